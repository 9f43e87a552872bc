# SPDX-License-Identifier: Apache-2.0
"""Runs step plans on a device: takes the plan in, forwards the model, samples, sends results back.

    launch(plan)   slots <- admissions, block updates
                   batch <- plan             one copy to the device
                   hidden states, logits     eager, or a captured graph where the step is small
                   token table <- sampled    the next step reads them there
                   drafts                    from the MTP layer, where it is used
                   results -> host           one copy, awaited by PendingStep.wait

On a GPU nothing here waits for the device. On a CPU the step is done when `launch` returns.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.config import DraftMethod, SpeculativeConfig
from pelton.core.geometry import ModelGeometry
from pelton.core.step import StepPlan
from pelton.engine.decode_step import DecodeOutput, DecodeStep, DraftStep
from pelton.engine.grammar_masks import GrammarMasks
from pelton.engine.input_builder import InputBuilder, StepInputs
from pelton.engine.kv.pool import KVPool
from pelton.engine.pending_step import LaunchedStep, PromptLogprobs
from pelton.engine.sampler import LogprobTensors, compile_draws, compute_logprobs, sample
from pelton.engine.sampling_batch import make_sampling_batch
from pelton.engine.slot_table import SlotTable
from pelton.engine.speculative.mtp import MTPDrafter
from pelton.engine.staging import IntArray
from pelton.engine.step_padding import NO_PADDING, StepPadding, uniform_size
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.highest_logit import highest_logit
from pelton.models.language_model import LanguageModel

_NOT_SPECULATIVE = SpeculativeConfig()


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
        speculative: SpeculativeConfig = _NOT_SPECULATIVE,
        padding: StepPadding = NO_PADDING,
        is_deterministic: bool = False,
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._device = device
        self._is_deterministic = is_deterministic
        self.padding = padding
        self.pool = pool
        self.caches = pool.caches
        self._slots = SlotTable(
            max_num_requests,
            max_model_len,
            block_size,
            len(geometry.kv_groups),
            device,
        )
        self._grammars = GrammarMasks(max_num_requests, geometry.vocab_size)
        self.input_builder = InputBuilder(
            geometry,
            pool,
            self._slots,
            max_num_rows=max_num_requests,
            max_num_tokens=max(max_num_tokens, max_num_requests),
            device=device,
            padding=padding,
            all_hidden_states=speculative.method is DraftMethod.MTP,
        )
        self.decode_step: DecodeStep = self.decode_eagerly
        """What runs steps of a padded size; replaced by captured graphs where there are some."""
        self.draft_step: DraftStep | None = None
        """What the model's MTP layer drafts with, if it does; may be replaced likewise."""
        if speculative.method is DraftMethod.MTP:
            layer = model.mtp_layer()
            assert layer is not None, f"{geometry.name} was built without its MTP layer"
            self.draft_step = MTPDrafter(layer, self._slots, speculative.num_drafts).draft

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        with batch_invariant(wanted=self._is_deterministic):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self._slots.apply(plan, writes_drafts=self.draft_step is None)
        for admission in plan.admissions:
            self._grammars.admit(admission)
        if not plan.num_rows:
            return LaunchedStep.empty(plan)
        inputs = self.input_builder.build(plan)
        if inputs.size is not None:
            return self._finish(plan, inputs, self.decode_step(inputs), [])
        hidden_states = self._model(inputs.batch)
        prompt_logprobs = [
            self._prompt_logprobs(plan, row, hidden_states) for row in plan.prompt_logprob_rows
        ]
        return self._finish(plan, inputs, self._pick(hidden_states, inputs), prompt_logprobs)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Runs a padding row and draws a token: no request waits for a kernel's first call."""
        decoded = self.decode_step(self.input_builder.build_padding(uniform_size(1)))
        compile_draws(decoded.logits[:1], decoded.token_ids[:1])

    def decode_eagerly(self, inputs: StepInputs) -> DecodeOutput:
        """Forward pass, highest logits and, of one token a row, the token table of a step of a
        padded size. Fixed shapes, no allocation that outlives it but its result: may be captured
        into a graph."""
        decoded = self._pick(self._model(inputs.batch), inputs)
        # What is sampled at one draft must not replace the next one before that one's own place
        # is sampled, as if the drafts before it were settled.
        if inputs.row_len == 1:
            self._store(decoded.token_ids, inputs.targets)
        return decoded

    def _pick(self, hidden_states: Float[Tensor, "M D"], inputs: StepInputs) -> DecodeOutput:
        wanted = hidden_states
        if inputs.row_len != 1 and inputs.batch.hidden_rows is None:
            wanted = hidden_states.index_select(0, inputs.batch.logit_rows)
        logits = self._model.logits(wanted)
        return DecodeOutput(hidden_states, logits, *highest_logit(logits))

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
        columns = self._slots.sampling
        logprobs: LogprobTensors | None = None
        sampling_rows = np.flatnonzero(plan.samples).astype(np.int32)
        sampling_slots = np.array(plan.slots, np.int32)[sampling_rows]
        masks = self._grammars.fill(sampling_slots, _drafts_by_index(plan, sampling_rows))
        controls = None
        if len(rows):
            controls = make_sampling_batch(columns, slots, inputs.positions, self._device, masks)
        if controls is not None:
            sampled = sample(decoded.logits[: len(rows)], controls, self._slots.tokens)
            token_ids, is_finite, logprobs = sampled.token_ids, sampled.is_finite, sampled.logprobs
        if controls is not None or inputs.row_len != 1:
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
        if self.draft_step is not None:
            guesses = self.draft_step(inputs, decoded.hidden_states)
            step.expect_drafts(sampling_rows.tolist(), guesses[: len(sampling_rows)])
        if masks is not None:
            self._grammars.note(step, sampling_rows, sampling_slots)
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


def _drafts_by_index(plan: StepPlan, sampling_rows: IntArray) -> dict[int, Sequence[int]]:
    """The plan's drafts, by index into the rows that sample."""
    if not plan.drafts:
        return {}
    rows = list(plan.drafts)
    return dict(
        zip(np.searchsorted(sampling_rows, rows).tolist(), plan.drafts.values(), strict=True)
    )
