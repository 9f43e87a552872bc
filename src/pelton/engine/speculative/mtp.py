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

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.engine.input_builder import StepInputs
from pelton.engine.slot_table import SlotTable
from pelton.kernels.highest_logit import highest_logit
from pelton.models.language_model import MTPLayer


class MTPDrafter:
    """Drafts on the device, in the step that samples. No shape depends on a value there."""

    def __init__(self, layer: MTPLayer, slots: SlotTable, num_drafts: int) -> None:
        self._layer = layer
        self._slots = slots
        self._num_drafts = num_drafts

    def draft(self, inputs: StepInputs, hidden_states: Float[Tensor, "T D"]) -> Int[Tensor, "n k"]:
        """`hidden_states` are the model's; the tokens sampled are in the token table already. A
        step that samples nothing fills the layer's cache all the same."""
        batch = inputs.batch
        flat_tokens = self._slots.tokens.view(-1)
        following = (inputs.token_index + 1).clamp_(max=flat_tokens.shape[0] - 1)
        hidden_states = self._layer(hidden_states, flat_tokens.index_select(0, following), batch)
        if not inputs.going_on.slots.shape[0]:
            return following.new_empty((0, self._num_drafts))
        last = self._last_accepted(inputs)
        hidden_states = hidden_states.index_select(0, last)
        drafts = [highest_logit(self._layer.logits(hidden_states))[0]]
        chain = self._start_chain(inputs.going_on.slots, batch, last)
        for _ in range(1, self._num_drafts):
            chain = self._move_on(chain, drafts[-1])
            hidden_states = self._layer(hidden_states, drafts[-1], chain)
            drafts.append(highest_logit(self._layer.logits(hidden_states))[0])
        token_ids = torch.stack(drafts, dim=1)
        self._store(token_ids, inputs.going_on.slots, batch.positions.index_select(0, last) + 2)
        return token_ids

    def _store(
        self, drafts: Int[Tensor, "n k"], slots: Int[Tensor, " n"], positions: Int[Tensor, " n"]
    ) -> None:
        """Puts each row's drafts into the token table, from `positions` on, as if they were known:
        the next step is planned, and its tokens gathered, before the host has seen them."""
        places = positions[:, None] + torch.arange(self._num_drafts, device=positions.device)
        stride = self._slots.token_stride
        flat = slots[:, None] * stride + places
        flat = torch.where(places < stride, flat, self._slots.tokens.numel() - 1)
        self._slots.tokens.view(-1).index_copy_(0, flat.flatten(), drafts.flatten())

    def _last_accepted(self, inputs: StepInputs) -> Int[Tensor, " n"]:
        """Of each row that samples, the step's token after which its newest token was sampled: the
        last one that is not a rejected draft."""
        batch, going_on = inputs.batch, inputs.going_on
        places = torch.arange(self._num_drafts, device=batch.token_ids.device)
        logits = going_on.first_logits[:, None] + places  # [n, k]: each draft must equal its sample
        logits.clamp_(max=batch.logit_rows.shape[0] - 1)
        sampled = self._slots.tokens.view(-1)[inputs.targets[logits].long()]
        drafted = (batch.logit_rows[logits].long() + 1).clamp_(max=batch.num_tokens - 1)
        is_right = (batch.token_ids[drafted] == sampled) & (places < going_on.num_drafts[:, None])
        num_accepted = is_right.int().cumprod(dim=1).sum(dim=1)
        return batch.logit_rows[going_on.first_logits + num_accepted]

    def _start_chain(
        self, slots: Int[Tensor, " n"], batch: ForwardBatch, last: Int[Tensor, " n"]
    ) -> ForwardBatch:
        """A batch of one token a row, at the rows' last accepted tokens."""
        num_rows = slots.shape[0]
        positions = batch.positions.index_select(0, last)
        order = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
        groups = tuple(
            replace(
                group,
                block_tables=table.index_select(0, slots),
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
