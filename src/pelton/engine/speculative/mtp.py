# SPDX-License-Identifier: Apache-2.0
"""Drafts from the model's multi-token prediction layer, run once for each draft.

After DeepSeek-V3's technical report, section 2.2, with one layer for every depth (the chain of
EAGLE). The layer takes the hidden state of position i and the token of position i + 1, and guesses
the token of position i + 2. Its keys and values of position i lie in the request's blocks like any
layer's. First it runs over all tokens of the step, which fills its cache with what the model's own
hidden states say; its output at a row's last accepted token gives the first draft. Each further
draft is a step of one token a row, from the layer's own hidden state and the draft before.

    position         i          i + 1        i + 2
    step             h_i, t_i+1   -> draft 1 = t_i+2
    1st chain step              g_i, draft 1   -> draft 2 = t_i+3
    2nd chain step                           g_i+1, draft 2   -> ...

What the chain and rejected tokens leave in the cache lies behind every accepted token, and the
next step computes those places again before anything reads them: rewinding costs nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.core.step import StepPlan
from pelton.engine.input_builder import StepInputs
from pelton.engine.slot_table import SlotTable
from pelton.engine.staging import IntArray, upload
from pelton.kernels.highest_logit import highest_logit
from pelton.models.language_model import MTPLayer


@dataclass(frozen=True, slots=True)
class DraftTensors:
    rows: list[int]
    """The plan's rows that sampled a token, and so go on."""
    token_ids: Int[Tensor, "n k"]


class MTPDrafter:
    """Drafts on the device, without a host synchronisation, in the step that samples."""

    def __init__(
        self, layer: MTPLayer, slots: SlotTable, num_drafts: int, device: torch.device
    ) -> None:
        self._layer = layer
        self._slots = slots
        self._num_drafts = num_drafts
        self._device = device

    def draft(
        self, plan: StepPlan, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor
    ) -> DraftTensors | None:
        """`hidden_states` [T D] are the model's, `token_ids` [N] what was sampled from each of the
        step's logits, which is in the token table already. None: no row samples."""
        batch = inputs.batch
        flat_tokens = self._slots.tokens.view(-1)
        following = (inputs.token_index + 1).clamp_(max=flat_tokens.shape[0] - 1)
        hidden_states = self._layer(hidden_states, flat_tokens.index_select(0, following), batch)
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return None
        last = self._last_accepted(plan, inputs, token_ids)
        hidden_states = hidden_states.index_select(0, last)
        drafts = [highest_logit(self._layer.logits(hidden_states))[0]]
        chain = self._start_chain(plan, rows.astype(np.int32), batch, last)
        for _ in range(1, self._num_drafts):
            chain = self._move_on(chain, drafts[-1])
            hidden_states = self._layer(hidden_states, drafts[-1], chain)
            drafts.append(highest_logit(self._layer.logits(hidden_states))[0])
        return DraftTensors(rows.tolist(), torch.stack(drafts, dim=1))

    def _last_accepted(
        self, plan: StepPlan, inputs: StepInputs, token_ids: Int[Tensor, " N"]
    ) -> Int[Tensor, " n"]:
        """Of each row that samples, the step's token after which its newest token was sampled: the
        last one that is not a rejected draft."""
        logit_rows = inputs.batch.logit_rows
        if not plan.drafts:
            return logit_rows[: len(inputs.sample_rows)]
        _, first, counts = np.unique(inputs.sample_rows, return_index=True, return_counts=True)
        places = np.arange(counts.max() - 1, dtype=np.int32)
        # [n, drafts]: the logits that each draft must equal the sample of.
        verifying = np.minimum(first[:, None] + places, len(inputs.sample_rows) - 1)
        arrays: dict[str, IntArray] = {
            "first": first.astype(np.int32),
            "verifying": verifying.astype(np.int32),
            "is_draft": (places < counts[:, None] - 1).astype(np.int32),
        }
        sent = upload(arrays, self._device)
        index = sent["verifying"].long()
        drafted = (logit_rows.long()[index] + 1).clamp_(max=inputs.batch.num_tokens - 1)
        is_right = (inputs.batch.token_ids[drafted] == token_ids[index]) & (sent["is_draft"] > 0)
        num_accepted = is_right.int().cumprod(dim=1).sum(dim=1)
        return logit_rows.index_select(0, sent["first"] + num_accepted)

    def _start_chain(
        self, plan: StepPlan, rows: IntArray, batch: ForwardBatch, last: Int[Tensor, " n"]
    ) -> ForwardBatch:
        """A batch of one token a row, at the rows' last accepted tokens."""
        num_rows = len(rows)
        sent = upload({"slots": np.array(plan.slots, np.int32)[rows]}, self._device)
        positions = batch.positions.index_select(0, last)
        order = torch.arange(num_rows + 1, dtype=torch.int32, device=self._device)
        groups = tuple(
            replace(
                group,
                block_tables=table.index_select(0, sent["slots"]),
                slot_mapping=torch.zeros_like(positions),
            )
            for group, table in zip(batch.groups, self._slots.block_tables, strict=True)
        )
        return ForwardBatch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            query_starts=order,
            context_lens=positions + 1,
            groups=groups,
            logit_rows=order[:-1],
            num_decodes=num_rows,
            max_query_len=1,
            max_context_len=batch.max_context_len,
        )

    def _move_on(self, batch: ForwardBatch, token_ids: Int[Tensor, " n"]) -> ForwardBatch:
        """The batch one position further. At the end of the context it stays where it is, for
        drafts that nobody will ask for."""
        last_position = self._slots.max_tokens - 1
        positions = (batch.positions + 1).clamp_(max=last_position)
        return replace(
            batch,
            token_ids=token_ids,
            positions=positions,
            context_lens=positions + 1,
            groups=tuple(self._map_slots(group, positions) for group in batch.groups),
            max_context_len=min(batch.max_context_len + 1, last_position + 1),
        )

    def _map_slots(self, group: KVGroupBatch, positions: Int[Tensor, " n"]) -> KVGroupBatch:
        """Entries that the request has no block for are the null block's."""
        block_size = self._slots.block_size
        entries = torch.div(positions, block_size, rounding_mode="floor").long()
        blocks = group.block_tables.gather(1, entries[:, None])[:, 0]
        return replace(group, slot_mapping=blocks * block_size + positions % block_size)
