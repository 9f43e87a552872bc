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
    batch = _meta_batch(
        geometry, num_rows, new_tokens, context_len, block_size=block_size, kv_dtype=kv_dtype
    )
    with torch.inference_mode(), record_costs() as log:
        hidden_states = model(batch)
        wanted = hidden_states
        if not num_drafts:
            wanted = hidden_states.index_select(0, batch.logit_rows)
        highest_logit(model.logits(wanted))
        layer = model.mtp_layer() if num_drafts else None
        for place in range(num_drafts if layer is not None else 0):
            assert layer is not None
            # The first draft comes from a run over all tokens, each further one from a decode.
            hidden_states = layer(hidden_states, batch.token_ids, batch)
            hidden_states = hidden_states.index_select(0, batch.logit_rows)
            highest_logit(layer.logits(hidden_states))
            if place == 0:
                batch = _meta_batch(
                    geometry, num_rows, 1, context_len, block_size=block_size, kv_dtype=kv_dtype
                )
    return log


def _meta_batch(
    geometry: ModelGeometry,
    num_rows: int,
    new_tokens: int,
    context_len: int,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
) -> ForwardBatch:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=_META)

    num_tokens = num_rows * new_tokens
    num_entries = -(-context_len // block_size)
    num_blocks = [num_rows * num_entries + 1] * len(geometry.kv_groups)
    pool = KVPool(
        geometry, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, device=_META
    )
    groups = tuple(
        KVGroupBatch(
            cache=cache,
            block_tables=ints(num_rows, num_entries),
            slot_mapping=ints(num_tokens),
            window=group.window,
        )
        for group, cache in zip(geometry.kv_groups, pool.caches, strict=True)
    )
    return ForwardBatch(
        token_ids=ints(num_tokens),
        positions=ints(num_tokens),
        query_starts=ints(num_rows + 1),
        context_lens=ints(num_rows),
        groups=groups,
        logit_rows=ints(num_rows),
        num_decodes=num_rows if new_tokens == 1 else 0,
        max_query_len=new_tokens,
        max_context_len=context_len,
        chunk_lens=((new_tokens, context_len),) * num_rows if new_tokens > 1 else (),
    )
