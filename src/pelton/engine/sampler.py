# SPDX-License-Identifier: Apache-2.0
"""Chooses a token from each row of logits, on the device and without a host synchronisation.

Every row's choice is a function of that row alone: its logits, its request's parameters and tokens,
and its uniform number. Rows are handled in groups by what they ask for, so a row without controls
pays nothing for one with them. Ties go to the lowest token id everywhere. What needs temporaries
over the vocabulary, penalties and log-probabilities, goes in chunks of rows, so that they stay
bounded whatever the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.engine.sampling_batch import PenaltyRows, SamplingBatch
from pelton.kernels.apply_token_mask import apply_token_mask
from pelton.kernels.draw_tokens.op import draw_tokens
from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.highest_logit import highest_logit

_CHUNK_ELEMENTS = 2**22
"""Elements of a [rows, vocabulary] temporary: 16 MiB in float32, 32 rows of 128k."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Natural log of the model's distribution before any control, one entry a position."""

    logprobs: Float[Tensor, " n"]
    ranks: Int[Tensor, " n"]
    top_ids: Int[Tensor, "n k"]
    top_logprobs: Float[Tensor, "n k"]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: Int[Tensor, " N"]
    is_finite: Int[Tensor, " N"]
    """0 where the row's highest logit is not a finite number (a NaN anywhere makes it NaN)."""
    logprobs: LogprobTensors | None


def sample(
    logits: Float[Tensor, "N V"],
    batch: SamplingBatch,
    tokens: Int[Tensor, "slots+1 max_tokens+1"],
) -> Sampled:
    """Chooses tokens for all rows; may change `logits`. `tokens` are the slot table's, to count."""
    wanted, raw = batch.logprobs, logits
    raw_rows = None if wanted is None else wanted.rows
    if batch.changes_logits:
        if raw_rows is not None and logits.dtype == torch.float32:
            raw = logits.index_select(0, raw_rows)
            raw_rows = torch.arange(raw.shape[0], device=raw.device)
        # 16-bit logits stay as they are: the changed ones are a copy.
        logits = logits.float()
        _change_logits(logits, batch, tokens)
    token_ids, is_finite = highest_logit(logits)
    if batch.random is not None:
        drawn = draw_tokens(logits, token_ids, batch.random)
        token_ids.index_copy_(0, batch.random.rows, drawn)
    logprobs = None
    if wanted is not None and raw_rows is not None:
        chosen = token_ids.index_select(0, wanted.rows)
        logprobs = _concatenate(
            [
                _logprobs_chunk(raw.index_select(0, raw_rows[part]), chosen[part], wanted.num_top)
                for part in _row_chunks(raw_rows.shape[0], raw.shape[1])
            ]
        )
    return Sampled(token_ids, is_finite, logprobs)


def _change_logits(
    logits: Float[Tensor, "N V"],
    batch: SamplingBatch,
    tokens: Int[Tensor, "slots+1 max_tokens+1"],
) -> None:
    if batch.penalties is not None:
        _apply_penalties(logits, batch.penalties, tokens)
    if batch.bias is not None:
        rows, ids, values = batch.bias
        logits.index_put_((rows, ids), values, accumulate=True)
    if batch.bans is not None:
        rows, ids = batch.bans
        logits.view(-1).index_fill_(0, rows * logits.shape[1] + ids, float("-inf"))
    if batch.masks is not None:
        apply_token_mask(logits, *batch.masks)


def compile_draws(logits: Float[Tensor, "1 V"], token_ids: Int[Tensor, " 1"]) -> None:
    """Draws a token of no use from logits as they come and as controls leave them."""
    one = torch.ones(1, device=logits.device)
    rows = RandomRows(
        rows=torch.zeros(1, dtype=torch.int64, device=logits.device),
        temperature=one,
        uniforms=one / 2,
        top_k=one.int(),
        top_p=one / 2,
        min_p=one / 2,
        has_top_k=True,
        has_top_p=True,
    )
    for form in {logits.dtype: logits, torch.float32: logits.float()}.values():
        draw_tokens(form, token_ids, rows)


def compute_logprobs(
    make_logits: Callable[[Float[Tensor, "n D"]], Float[Tensor, "n V"]],
    hidden_states: Float[Tensor, "n D"],
    token_ids: Int[Tensor, " n"],
    num_top: int,
    vocab_size: int,
) -> LogprobTensors:
    """Of `token_ids` after `hidden_states`; the logits of at most a chunk of rows exist at once."""
    return _concatenate(
        [
            _logprobs_chunk(make_logits(hidden_states[part]), token_ids[part], num_top)
            for part in _row_chunks(len(token_ids), vocab_size)
        ]
    )


def _concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.tensors() for part in parts), strict=True)
    return LogprobTensors(*(torch.cat(column) for column in columns))


def _logprobs_chunk(
    logits: Float[Tensor, "n V"], token_ids: Int[Tensor, " n"], num_top: int
) -> LogprobTensors:
    logits = logits.float()
    normaliser = _log_sum_exp(logits)
    chosen = logits.gather(1, token_ids.long()[:, None])
    ranks = (logits > chosen).sum(dim=1, dtype=torch.int32) + 1
    if num_top == 0:
        # Not a part of the logits, which would keep them all in memory.
        empty = logits.new_empty((len(logits), 0))
        return LogprobTensors((chosen - normaliser)[:, 0], ranks, empty.int(), empty)
    top_logits, top_ids = _highest(logits, num_top)
    return LogprobTensors(
        (chosen - normaliser)[:, 0], ranks, top_ids.int(), top_logits - normaliser
    )


def _log_sum_exp(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n 1"]:
    """Of each row, by adding one half of what is left to the other: on a GPU the library sums in an
    order that depends on the number of rows."""
    highest = logits.amax(dim=1, keepdim=True)
    sums = torch.exp(logits - highest)
    while (width := sums.shape[1]) > 1:
        half = width // 2
        # An odd one in the middle waits for the next turn.
        sums[:, :half] += sums[:, width - half :]
        sums = sums[:, : width - half]
    return highest + sums.log()


def _apply_penalties(
    logits: Float[Tensor, "N V"], group: PenaltyRows, tokens: Int[Tensor, "slots+1 max_tokens+1"]
) -> None:
    for part in _row_chunks(group.rows.shape[0], logits.shape[1]):
        rows = group.rows[part]
        history = tokens[:, : group.max_length].index_select(0, group.slots[part]).long()
        positions = torch.arange(group.max_length, device=logits.device)
        is_past = positions < group.lengths[part, None]
        is_output = is_past & (positions >= group.num_prompt_tokens[part, None])
        x = logits.index_select(0, rows)
        counts = torch.zeros_like(x).scatter_add_(1, history, is_output.float())
        seen = torch.zeros_like(x).scatter_add_(1, history, is_past.float()) > 0
        repetition = group.repetition[part, None]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x -= group.frequency[part, None] * counts
        x -= group.presence[part, None] * (counts > 0)
        logits.index_copy_(0, rows, x)


def _highest(
    x: Float[Tensor, "n V"], count: int
) -> tuple[Float[Tensor, "n count"], Int[Tensor, "n count"]]:
    """The highest values of each row with their indices, best first, lower index among ties.

    A float's bits order like an integer once those of negative numbers are flipped; the index in
    the low half breaks ties the same way for any `count`, as a sort of the floats would not.
    """
    # Adding zero turns -0.0 into 0.0, which must tie with it.
    bits = (x + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    vocab_size = x.shape[1]
    keys = (ordered << 32) | torch.arange(vocab_size - 1, -1, -1, device=x.device)
    if count < vocab_size:
        keys = keys.topk(count, dim=1, sorted=True).values
    else:
        keys = keys.sort(dim=1, descending=True).values
    ids = (vocab_size - 1) - (keys & 0xFFFFFFFF)
    return x.gather(1, ids), ids


def _row_chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    """At least one, which may be empty."""
    step = max(1, _CHUNK_ELEMENTS // row_elements)
    for start in range(0, max(num_rows, 1), step):
        yield slice(start, min(start + step, num_rows))
