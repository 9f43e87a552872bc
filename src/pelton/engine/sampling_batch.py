# SPDX-License-Identifier: Apache-2.0
"""What the sampler needs of a step's rows beyond their logits, gathered from the slots' columns."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.engine.grammar_masks import FilledMasks
from pelton.engine.slot_table import SamplingColumns
from pelton.engine.staging import HostArray, IntArray, upload
from pelton.engine.uniform import uniforms
from pelton.kernels.draw_tokens.reference import RandomRows


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    rows: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    lengths: Int[Tensor, " n"]
    """Tokens of the request so far."""
    num_prompt_tokens: Int[Tensor, " n"]
    repetition: Float[Tensor, " n"]
    presence: Float[Tensor, " n"]
    frequency: Float[Tensor, " n"]
    max_length: int


@dataclass(frozen=True, slots=True)
class LogprobRows:
    rows: Int[Tensor, " n"]
    num_top: int
    """The most likeliest tokens that any of the rows asks for."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    random: RandomRows | None
    penalties: PenaltyRows | None
    bias: tuple[Tensor, Tensor, Tensor] | None
    """Rows, token ids and values to add, one entry for each biased token."""
    bans: tuple[Tensor, Tensor] | None
    """Rows and token ids that must not come yet."""
    masks: tuple[Tensor, Tensor] | None
    """Rows [n] and their packed token masks [n, words]."""
    logprobs: LogprobRows | None

    @property
    def changes_logits(self) -> bool:
        controls = self.penalties, self.bias, self.bans, self.masks
        return any(control is not None for control in controls)


def make_sampling_batch(
    columns: SamplingColumns,
    slots: IntArray,
    lengths: IntArray,
    device: torch.device,
    masks: FilledMasks | None = None,
) -> SamplingBatch | None:
    """For rows of logits that belong to `slots`, whose requests have `lengths` tokens so far (the
    new token's position). None: every row just takes its highest logit."""
    if columns.is_plain_greedy[slots].all():
        return None
    return SamplingBatch(
        random=_random_rows(columns, slots, lengths, device),
        penalties=_penalty_rows(columns, slots, lengths, device),
        bias=_bias_entries(columns, slots, device),
        bans=_banned_entries(columns, slots, lengths, device),
        masks=None if masks is None else _mask_rows(masks, device),
        logprobs=_logprob_rows(columns, slots, device),
    )


def _random_rows(
    columns: SamplingColumns, slots: IntArray, lengths: IntArray, device: torch.device
) -> RandomRows | None:
    rows = np.flatnonzero(columns.temperature[slots] > 0)
    if not len(rows):
        return None
    mine = slots[rows]
    top_k, top_p = columns.top_k[mine], columns.top_p[mine]
    arrays: dict[str, HostArray] = {
        "rows": rows.astype(np.int32),
        "temperature": columns.temperature[mine],
        "uniforms": uniforms(columns.seed[mine], lengths[rows]),
        "top_k": top_k,
        "top_p": top_p,
        "min_p": columns.min_p[mine],
    }
    sent = upload(arrays, device)
    sent["rows"] = sent["rows"].long()
    return RandomRows(**sent, has_top_k=bool((top_k > 0).any()), has_top_p=bool((top_p < 1).any()))


def _penalty_rows(
    columns: SamplingColumns, slots: IntArray, lengths: IntArray, device: torch.device
) -> PenaltyRows | None:
    rows = np.flatnonzero(columns.has_penalty[slots])
    if not len(rows):
        return None
    mine = slots[rows]
    arrays: dict[str, HostArray] = {
        "rows": rows.astype(np.int32),
        "slots": mine,
        "lengths": lengths[rows],
        "num_prompt_tokens": columns.num_prompt_tokens[mine],
        "repetition": columns.repetition[mine],
        "presence": columns.presence[mine],
        "frequency": columns.frequency[mine],
    }
    sent = upload(arrays, device)
    sent["rows"] = sent["rows"].long()
    return PenaltyRows(**sent, max_length=int(lengths[rows].max()))


def _bias_entries(
    columns: SamplingColumns, slots: IntArray, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [(row, bias) for row, slot in enumerate(slots) if (bias := columns.bias[slot])]
    if not entries:
        return None
    sizes = [len(ids) for _, (ids, _) in entries]
    arrays: dict[str, HostArray] = {
        "rows": np.repeat(np.array([row for row, _ in entries], np.int32), sizes),
        "ids": np.concatenate([ids for _, (ids, _) in entries]),
        "values": np.concatenate([values for _, (_, values) in entries]),
    }
    sent = upload(arrays, device)
    return sent["rows"].long(), sent["ids"].long(), sent["values"]


def _banned_entries(
    columns: SamplingColumns, slots: IntArray, lengths: IntArray, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    is_early = lengths - columns.num_prompt_tokens[slots] < columns.min_tokens[slots]
    entries = [
        (row, banned)
        for row in np.flatnonzero(is_early)
        if (banned := columns.banned[slots[row]]) is not None
    ]
    if not entries:
        return None
    sizes = [len(ids) for _, ids in entries]
    arrays: dict[str, HostArray] = {
        "rows": np.repeat(np.array([row for row, _ in entries], np.int32), sizes),
        "ids": np.concatenate([ids for _, ids in entries]),
    }
    sent = upload(arrays, device)
    return sent["rows"].long(), sent["ids"].long()


def _mask_rows(masks: FilledMasks, device: torch.device) -> tuple[Tensor, Tensor]:
    sent = upload({"rows": masks.rows, "masks": masks.masks}, device)
    return sent["rows"].long(), sent["masks"]


def _logprob_rows(
    columns: SamplingColumns, slots: IntArray, device: torch.device
) -> LogprobRows | None:
    num_top = columns.num_logprobs[slots]
    rows = np.flatnonzero(num_top >= 0)
    if not len(rows):
        return None
    sent = upload({"rows": rows.astype(np.int32)}, device)
    return LogprobRows(sent["rows"].long(), int(num_top[rows].max()))
