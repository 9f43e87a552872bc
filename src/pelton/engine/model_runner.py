# SPDX-License-Identifier: Apache-2.0
"""Runs step plans on a device: takes the plan in, forwards the model, samples, sends results back.

    launch(plan)   slots <- admissions, block updates
                   batch <- plan             one copy to the device
                   hidden states, logits     eager, or a captured graph for decodes
                   token table <- sampled    the next step reads them there
                   results -> host           one copy, awaited by PendingStep.wait

On a GPU nothing here waits for the device. On a CPU the step is done when `launch` returns.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.core.geometry import ModelGeometry
from pelton.core.step import StepPlan
from pelton.engine.decode_step import DecodeOutput, DecodeStep
from pelton.engine.grammar_masks import GrammarMasks
from pelton.engine.input_builder import InputBuilder, StepInputs, no_padding
from pelton.engine.kv.pool import KVPool
from pelton.engine.pending_step import LaunchedStep, PromptLogprobs
from pelton.engine.sampler import LogprobTensors, compute_logprobs, sample
from pelton.engine.sampling_batch import make_sampling_batch
from pelton.engine.slot_table import SlotTable
from pelton.kernels.highest_logit import highest_logit
from pelton.models.language_model import LanguageModel


class ModelRunner:
    """Implements `core.ports.Executor`."""

    def __init__(
        self,
        model: LanguageModel,
        geometry: ModelGeometry,
        pool: KVPool,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        padded_decode_rows: Callable[[int], int] = no_padding,
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._device = device
        self.caches = pool.caches
        self._slots = SlotTable(
            max_num_requests, max_model_len, block_size, len(geometry.kv_groups), device
        )
        self._grammars = GrammarMasks(max_num_requests, geometry.vocab_size)
        self.input_builder = InputBuilder(
            geometry,
            pool,
            self._slots,
            max_num_rows=max_num_requests,
            max_num_tokens=max(max_num_tokens, max_num_requests),
            device=device,
            padded_decode_rows=padded_decode_rows,
        )
        self.decode_step: DecodeStep = self.decode_eagerly
        """What runs steps of decodes; replaced by captured graphs where there are some."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._slots.apply(plan)
        for admission in plan.admissions:
            self._grammars.admit(admission)
        if not plan.num_rows:
            return LaunchedStep.empty(plan)
        inputs = self.input_builder.build(plan)
        if plan.num_decodes == plan.num_rows:
            decoded = self.decode_step(inputs.batch, inputs.targets)
            return self._finish(plan, inputs, decoded, [])
        hidden_states = self._model(inputs.batch)
        prompt_logprobs = [
            self._prompt_logprobs(plan, row, hidden_states) for row in plan.prompt_logprob_rows
        ]
        decoded = self._pick(hidden_states.index_select(0, inputs.batch.logit_rows), inputs.targets)
        return self._finish(plan, inputs, decoded, prompt_logprobs)

    def decode_eagerly(self, batch: ForwardBatch, targets: Int[Tensor, " N"]) -> DecodeOutput:
        """Forward pass, highest logits and token table of a batch of decodes. Fixed shapes, no
        allocation that outlives it but its result: may be captured into a graph."""
        return self._pick(self._model(batch), targets)

    def _pick(
        self, hidden_states: Float[Tensor, "N D"], targets: Int[Tensor, " N"]
    ) -> DecodeOutput:
        logits = self._model.logits(hidden_states)
        token_ids, is_finite = highest_logit(logits)
        self._store(token_ids, targets)
        return DecodeOutput(logits, token_ids, is_finite)

    def _store(self, token_ids: Int[Tensor, " N"], targets: Int[Tensor, " N"]) -> None:
        self._slots.tokens.view(-1).index_copy_(0, targets.long(), token_ids)

    def _finish(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        decoded: DecodeOutput,
        prompt_logprobs: list[PromptLogprobs],
    ) -> LaunchedStep:
        rows = inputs.sample_rows
        token_ids, is_finite = decoded.token_ids[: len(rows)], decoded.is_finite[: len(rows)]
        slots = np.array(plan.slots, np.int32)[rows]
        lengths = (np.array(plan.starts, np.int32) + np.array(plan.num_tokens, np.int32))[rows]
        columns = self._slots.sampling
        logprobs: LogprobTensors | None = None
        masks = self._grammars.fill(slots)
        controls = None
        if len(rows):
            controls = make_sampling_batch(columns, slots, lengths, self._device, masks)
        if controls is not None:
            sampled = sample(decoded.logits[: len(rows)], controls, self._slots.tokens)
            token_ids, is_finite, logprobs = sampled.token_ids, sampled.is_finite, sampled.logprobs
            self._store(token_ids, inputs.targets[: len(rows)])
        step = LaunchedStep(
            plan,
            rows,
            token_ids,
            is_finite,
            logprobs,
            columns.num_logprobs[slots],
            prompt_logprobs,
            {} if masks is None else masks.failures,
        )
        if masks is not None:
            self._grammars.note(step, rows, slots)
        return step

    def _prompt_logprobs(
        self, plan: StepPlan, row: int, hidden_states: Float[Tensor, "T D"]
    ) -> PromptLogprobs:
        """Of the prompt tokens that follow the row's tokens."""
        slot, start = plan.slots[row], plan.starts[row]
        columns = self._slots.sampling
        num_prompt_tokens = int(columns.num_prompt_tokens[slot])
        count = min(plan.num_tokens[row], num_prompt_tokens - start - 1)
        num_top = max(int(columns.num_prompt_logprobs[slot]), 0)
        first = sum(plan.num_tokens[:row])
        hidden_states = hidden_states[first : first + count]
        targets = self._slots.tokens[slot, start + 1 : start + 1 + count]
        tensors = compute_logprobs(
            self._model.logits, hidden_states, targets, num_top, self._geometry.vocab_size
        )
        return PromptLogprobs(row, targets.clone(), tensors)
