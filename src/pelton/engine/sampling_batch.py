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


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that sample at a temperature above 0, all with filters or all without."""

    rows: Int[Tensor, " n"]
    temperature: Float[Tensor, " n"]
    uniforms: Float[Tensor, " n"]
    filters: tuple[Int[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]] | None
    """top-k (0: off), top-p, min-p."""
    max_top_k: int
    """The largest top-k when every row has one, else 0."""


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
    random: tuple[RandomRows, ...]
    penalties: PenaltyRows | None
    bias: tuple[Tensor, Tensor, Tensor] | None
    """Rows, token ids and values to add, one entry for each biased token."""
    bans: tuple[Tensor, Tensor] | None
    """Rows and token ids that must not come yet."""
    masks: tuple[Tensor, Tensor] | None
    """Rows [n] and their packed token masks [n, words]."""
    logprobs: LogprobRows | None


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
    is_random = columns.temperature[slots] > 0
    has_filter = columns.has_filter[slots]
    return SamplingBatch(
        random=tuple(
            _random_rows(columns, slots, lengths, np.flatnonzero(mask), device)
            for mask in (is_random & ~has_filter, is_random & has_filter)
            if mask.any()
        ),
        penalties=_penalty_rows(columns, slots, lengths, device),
        bias=_bias_entries(columns, slots, device),
        bans=_banned_entries(columns, slots, lengths, device),
        masks=None if masks is None else _mask_rows(masks, device),
        logprobs=_logprob_rows(columns, slots, device),
    )


def _random_rows(
    columns: SamplingColumns,
    slots: IntArray,
    lengths: IntArray,
    rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    device: torch.device,
) -> RandomRows:
    mine = slots[rows]
    top_k = columns.top_k[mine]
    sent = upload(
        {
            "rows": rows.astype(np.int32),
            "temperature": columns.temperature[mine],
            "uniforms": uniforms(columns.seed[mine], lengths[rows]),
            "top_k": top_k,
            "top_p": columns.top_p[mine],
            "min_p": columns.min_p[mine],
        },
        device,
    )
    has_filter = bool(columns.has_filter[mine[0]])
    return RandomRows(
        rows=sent["rows"].long(),
        temperature=sent["temperature"],
        uniforms=sent["uniforms"],
        filters=(sent["top_k"], sent["top_p"], sent["min_p"]) if has_filter else None,
        max_top_k=int(top_k.max()) if (top_k > 0).all() else 0,
    )


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
