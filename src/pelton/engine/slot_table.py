# SPDX-License-Identifier: Apache-2.0
"""What the executor keeps of each request that holds a slot.

Tokens and block tables live on the device: a sampled token is written there by the device and
read from there by the next step, so it never visits the host first. Block tables have a twin on
the host, from which the places to write keys and values are computed; the sampling parameters are
kept as one column each, so that a step's rows are one gather.
"""

from itertools import repeat

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.request import SamplingParams
from pelton.core.step import Admission, StepPlan
from pelton.engine.kv.blocks import NULL_BLOCK
from pelton.engine.staging import IntArray, upload


class SlotTable:
    """`num_slots` requests of at most `max_tokens` tokens each, in `num_groups` KV groups."""

    tokens: Int[Tensor, "slots+1 max_tokens+1"]
    """Token ids by position. The last row takes what rows that sample nothing write."""
    block_tables: tuple[Int[Tensor, "slots+1 B"], ...]
    """The last row, of padding rows, names the null block alone."""

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self.block_size = block_size
        self.max_tokens = max_tokens
        # One more column: the last token sampled has a position but is never computed.
        self.tokens = torch.zeros((num_slots + 1, max_tokens + 1), dtype=torch.int32, device=device)
        assert self.tokens.numel() < 2**31, "slots times context must fit 31 bits"
        blocks_per_request = -(-max_tokens // block_size)
        shape = (num_slots + 1, blocks_per_request)
        self.block_tables = tuple(
            torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)
        )
        self.host_block_tables: tuple[IntArray, ...] = tuple(
            table.numpy() if device.type == "cpu" else np.zeros(shape, np.int32)
            for table in self.block_tables
        )
        self.sampling = SamplingColumns(num_slots)

    @property
    def padding_slot(self) -> int:
        """Of no request."""
        return self.tokens.shape[0] - 1

    @property
    def token_stride(self) -> int:
        return self.tokens.shape[1]

    def apply(self, plan: StepPlan, *, writes_drafts: bool = True) -> None:
        """Takes in the plan's admissions, block updates and drafts; the drafts need not be written
        where the device has put them into the token table itself."""
        if plan.admissions:
            self._admit(plan.admissions)
        if plan.block_updates:
            self._update_blocks(plan)
        if plan.drafts and writes_drafts:
            self._write_drafts(plan)

    def _admit(self, admissions: list[Admission]) -> None:
        arrays = {
            str(admission.slot): np.asarray(admission.token_ids, np.int32)
            for admission in admissions
        }
        uploaded = upload(arrays, self._device)
        for admission in admissions:
            token_ids = uploaded[str(admission.slot)]
            self.tokens[admission.slot, : token_ids.shape[0]] = token_ids
            self.sampling.set(admission)
        slots = np.array([admission.slot for admission in admissions], np.int32)
        for host_table, table in zip(self.host_block_tables, self.block_tables, strict=True):
            # What drafting writes past the request's blocks must not land in its predecessor's.
            host_table[slots] = NULL_BLOCK
            if self._device.type != "cpu":
                index = upload({"slots": slots}, self._device)["slots"]
                table.index_fill_(0, index.long(), NULL_BLOCK)

    def _update_blocks(self, plan: StepPlan) -> None:
        updates = np.array(plan.block_updates, np.int32)  # [n, (group, slot, entry, block id)]
        for group, host_table in enumerate(self.host_block_tables):
            mine = updates[updates[:, 0] == group]
            host_table[mine[:, 1], mine[:, 2]] = mine[:, 3]
            if self._device.type == "cpu" or not len(mine):
                continue
            # A step may set an entry twice (freed and taken again); the last one counts, which a
            # scatter does not promise, so every entry is sent with its final value.
            flat = mine[:, 1] * host_table.shape[1] + mine[:, 2]
            values = host_table[mine[:, 1], mine[:, 2]]
            sent = upload({"flat": flat, "values": values}, self._device)
            self.block_tables[group].view(-1).index_put_((sent["flat"].long(),), sent["values"])

    def _write_drafts(self, plan: StepPlan) -> None:
        """Puts the drafts after their rows' known tokens, as if they were known too."""
        counts = [len(drafts) for drafts in plan.drafts.values()]
        rows = list(plan.drafts)
        slots, starts = np.array(plan.slots, np.int32)[rows], np.array(plan.starts, np.int32)[rows]
        offsets = np.concatenate([np.arange(1, count + 1, dtype=np.int32) for count in counts])
        flat = np.repeat(slots * self.token_stride + starts, counts) + offsets
        tokens = np.concatenate([np.array(drafts, np.int32) for drafts in plan.drafts.values()])
        sent = upload({"flat": flat, "tokens": tokens}, self._device)
        self.tokens.view(-1).index_copy_(0, sent["flat"].long(), sent["tokens"])


class SamplingColumns:
    """Sampling parameters by slot: a numpy column for each that steps compute with."""

    def __init__(self, num_slots: int) -> None:
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.repetition = np.ones(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        """How many likeliest tokens to report; -1: no logprobs at all."""
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        self.is_plain_greedy = np.zeros(num_slots, np.bool_)
        """Greedy and nothing else asked: the highest logit is all there is to find."""
        self.has_penalty = np.zeros(num_slots, np.bool_)
        self.bias: list[tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.float32]]] | None] = [
            *repeat(None, num_slots)
        ]
        self.banned: list[IntArray | None] = [*repeat(None, num_slots)]
        """Tokens that may not come before min_tokens."""

    def set(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.sampling
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.seed[slot] = admission.seed & (2**64 - 1)
        self.temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self.top_k[slot] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = (
            -1 if params.prompt_logprobs is None else params.prompt_logprobs
        )
        self.has_penalty[slot] = _has_penalty(params)
        bans = bool(params.min_tokens and admission.eos_token_ids)
        self.banned[slot] = np.array(admission.eos_token_ids, np.int32) if bans else None
        self.bias[slot] = None
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int32)
            self.bias[slot] = ids, np.fromiter(params.logit_bias.values(), np.float32)
        self.is_plain_greedy[slot] = (
            params.is_greedy
            and params.logprobs is None
            and not (self.has_penalty[slot] or params.logit_bias or bans or params.grammar)
        )


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
