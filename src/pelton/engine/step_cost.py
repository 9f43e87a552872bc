# SPDX-License-Identifier: Apache-2.0
"""What one step of a model must do at least: its ops' costs, from a run on `meta` tensors.

Nothing is allocated and no weight is read, so a model of any size is costed in seconds.
"""

import torch

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.core.geometry import ModelGeometry
from pelton.engine.kv.pool import KVPool
from pelton.kernels.highest_logit import highest_logit
from pelton.models.language_model import LanguageModel
from pelton.perf.cost import CostLog, record_costs

_META = torch.device("meta")


def step_costs(
    model: LanguageModel,
    geometry: ModelGeometry,
    *,
    num_rows: int,
    new_tokens: int,
    context_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
    num_drafts: int = 0,
) -> CostLog:
    """Of a step of `num_rows` rows alike: `new_tokens` each (1: decodes) on a context of
    `context_len` with them, a greedy token each. `model` is on `meta`. Decodes with drafts verify
    `num_drafts` each and, by the model's MTP layer if it was built with it, make as many."""
    if num_drafts:
        assert new_tokens == 1, "prompts have no drafts"
        new_tokens = 1 + num_drafts
    batch, next_batch = (
        make_batch(
            geometry, num_rows, count, context_len, block_size=block_size, kv_dtype=kv_dtype,
            is_prompt=not num_drafts,
        )
        for count in (new_tokens, 1)
    )  # fmt: skip
    with torch.inference_mode(), record_costs() as log:
        run_step(model, batch, next_batch, num_drafts)
    return log


def run_step(
    model: LanguageModel, batch: ForwardBatch, next_batch: ForwardBatch, num_drafts: int
) -> None:
    """What an executor runs of a greedy step on the device, but for bookkeeping. `next_batch` has
    one token a row: what the MTP layer goes on with after its first draft."""
    hidden_states = model(batch)
    wanted = hidden_states
    if not num_drafts and batch.hidden_rows is None:
        wanted = hidden_states.index_select(0, batch.logit_rows)
    highest_logit(model.logits(wanted))
    layer = model.mtp_layer() if num_drafts else None
    for _ in range(num_drafts if layer is not None else 0):
        assert layer is not None
        hidden_states = layer(hidden_states, batch.token_ids, batch)
        hidden_states = hidden_states.index_select(0, batch.logit_rows)
        highest_logit(layer.logits(hidden_states))
        batch = next_batch


def make_batch(
    geometry: ModelGeometry,
    num_rows: int,
    new_tokens: int,
    context_len: int,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    is_prompt: bool = True,
    device: torch.device = _META,
) -> ForwardBatch:
    """Rows alike, each in blocks of its own, which nobody fills; not `is_prompt`: rows of several
    tokens are decodes with drafts."""

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32)

    num_tokens = num_rows * new_tokens
    num_entries = -(-context_len // block_size)
    num_blocks = [num_rows * num_entries + 1] * len(geometry.kv_groups)
    pool = KVPool(
        geometry, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, device=device
    )
    if device.type == "meta":
        tables, positions, order = (
            torch.empty(shape, dtype=torch.int32, device=device)
            for shape in ((num_rows, num_entries), num_tokens, num_rows + 1)
        )
        slots, ids, lengths, last = positions, positions, order[1:], order[1:]
    else:
        order = ints(torch.arange(num_rows + 1, device=device) * new_tokens)
        tables = ints(torch.arange(1, num_blocks[0], device=device)).view(num_rows, num_entries)
        positions = ints(torch.arange(context_len - new_tokens, context_len, device=device))
        slots = tables[:, (positions // block_size).long()] * block_size + positions % block_size
        positions, slots = positions.repeat(num_rows), slots.flatten()
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.randint(
            geometry.vocab_size, (num_tokens,), generator=generator, device=device
        ).int()
        lengths, last = torch.full_like(order[1:], context_len), order[1:] - 1
    groups = tuple(
        KVGroupBatch(cache=cache, block_tables=tables, slot_mapping=slots, window=group.window)
        for group, cache in zip(geometry.kv_groups, pool.caches, strict=True)
    )
    is_chunked = is_prompt and new_tokens > 1
    return ForwardBatch(
        token_ids=ids,
        positions=positions,
        query_starts=order,
        context_lens=lengths,
        groups=groups,
        logit_rows=last,
        hidden_rows=last if is_chunked else None,
        num_decodes=num_rows if new_tokens == 1 else 0,
        max_query_len=new_tokens,
        max_context_len=context_len,
        chunk_lens=((new_tokens, context_len),) * num_rows if is_chunked else (),
    )
