# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Un-absorbed latent attention: runs of queries over runs of keys, causal or not.

The softmax is computed online (Dao, "FlashAttention-2", 2023, algorithm 1), and its state, the mean
of values with the log-sum-exp, may come from a call before and go on to a next one. Scores are the
sum of two products, so that a head's 128 + 64 numbers are not padded to 256.
"""

from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.mla.triton import LOG2_E
from pelton.kernels.triton_runtime import cdiv, next_power_of_2, tl, triton


@triton.jit
def _attend(
    q_nope,
    q_rope,
    keys_ptr,
    rope_keys_ptr,
    values_ptr,
    stride_kn,
    stride_rn,
    stride_vn,
    start,
    end,
    last_seen,
    running_max,
    running_sum,
    acc,
    scale_log2,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Keys [start, end) in whole tiles. Without a mask, every query sees every key of them."""
    nope_dims, rope_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    value_dims = tl.arange(0, BLOCK_V)
    for tile_start in range(start, end, BLOCK_N):
        places = tile_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        rows = places.to(tl.int64)[:, None]
        nope_mask = (nope_dims < NOPE)[None, :]
        rope_mask = (rope_dims < ROPE)[None, :]
        value_mask = (value_dims < VALUE)[None, :]
        if IS_MASKED:
            is_read = (places < end)[:, None]
            nope_mask = is_read & nope_mask
            rope_mask = is_read & rope_mask
            value_mask = is_read & value_mask
        k_ptr = keys_ptr + rows * stride_kn + nope_dims[None, :]
        k = tl.load(k_ptr, mask=nope_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        r_ptr = rope_keys_ptr + rows * stride_rn + rope_dims[None, :]
        r = tl.load(r_ptr, mask=rope_mask, other=0.0)  # [BLOCK_N, BLOCK_R]
        v_ptr = values_ptr + rows * stride_vn + value_dims[None, :]
        v = tl.load(v_ptr, mask=value_mask, other=0.0)  # [BLOCK_N, BLOCK_V]

        scores = tl.dot(q_nope, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision="ieee")
        if IS_MASKED:
            scores = tl.where(places[None, :] <= last_seen[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)
        # A query may see nothing of this tile; its maximum must not become a NaN.
        finite_max = tl.where(new_max > float("-inf"), new_max, 0.0)
        probabilities = tl.exp2(scores * scale_log2 - finite_max[:, None])
        correction = tl.exp2(running_max - finite_max)
        running_sum = running_sum * correction + tl.sum(probabilities, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(probabilities.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit
def _latent_prefill_kernel(
    q_nope_ptr,
    q_rope_ptr,
    keys_ptr,
    rope_keys_ptr,
    values_ptr,
    spans_ptr,
    out_ptr,
    lse_ptr,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_kn,
    stride_kh,
    stride_rn,
    stride_vn,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_lt,
    stride_lh,
    scale_log2,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    # Tiles of one head run side by side and share its keys and values in the cache of the card.
    # The last ones see the most: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    span_ptr = spans_ptr + tl.program_id(2) * 4
    first_query = tl.load(span_ptr).to(tl.int64)
    num_queries = tl.load(span_ptr + 1)
    first_key = tl.load(span_ptr + 2).to(tl.int64)
    num_keys = tl.load(span_ptr + 3)
    tile_query = tile * BLOCK_M
    if tile_query >= num_queries:
        return
    queries = tile_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    is_query = queries < num_queries
    rows = (first_query + queries)[:, None]
    nope_dims, rope_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    value_dims = tl.arange(0, BLOCK_V)
    q_ptr = q_nope_ptr + rows * stride_qt + head * stride_qh + nope_dims[None, :]
    q_nope = tl.load(q_ptr, mask=is_query[:, None] & (nope_dims < NOPE)[None, :], other=0.0)
    q_ptr = q_rope_ptr + rows * stride_rt + head * stride_rh + rope_dims[None, :]
    q_rope = tl.load(q_ptr, mask=is_query[:, None] & (rope_dims < ROPE)[None, :], other=0.0)

    out_tile_ptr = out_ptr + rows * stride_ot + head * stride_oh + value_dims[None, :]
    out_mask = is_query[:, None] & (value_dims < VALUE)[None, :]
    lse_tile_ptr = lse_ptr + (first_query + queries) * stride_lt + head * stride_lh
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if CONTINUES:
        # Keys seen before are one key whose score is their log-sum-exp and whose value their mean.
        running_max = tl.load(lse_tile_ptr, mask=is_query, other=0.0) * 1.4426950408889634
        running_sum = tl.where(running_max == float("-inf"), 0.0, 1.0)
        acc = tl.load(out_tile_ptr, mask=out_mask, other=0.0).to(tl.float32)

    all_see = num_keys
    end = num_keys
    last_seen = queries * 0 + num_keys - 1
    if IS_CAUSAL:
        hidden = num_keys - num_queries
        last_seen = hidden + queries
        all_see = tl.maximum(hidden + tile_query + 1, 0)
        end = tl.maximum(tl.minimum(num_keys, hidden + tile_query + BLOCK_M), 0)
    unmasked_end = all_see // BLOCK_N * BLOCK_N
    keys_ptr += first_key * stride_kn + head * stride_kh
    rope_keys_ptr += first_key * stride_rn
    values_ptr += first_key * stride_vn + head * stride_vh
    running_max, running_sum, acc = _attend(
        q_nope, q_rope, keys_ptr, rope_keys_ptr, values_ptr, stride_kn, stride_rn, stride_vn,
        0, unmasked_end, last_seen, running_max, running_sum, acc, scale_log2,
        NOPE, ROPE, VALUE, BLOCK_N, BLOCK_K, BLOCK_R, BLOCK_V, False,
    )  # fmt: skip
    running_max, running_sum, acc = _attend(
        q_nope, q_rope, keys_ptr, rope_keys_ptr, values_ptr, stride_kn, stride_rn, stride_vn,
        unmasked_end, end, last_seen, running_max, running_sum, acc, scale_log2,
        NOPE, ROPE, VALUE, BLOCK_N, BLOCK_K, BLOCK_R, BLOCK_V, True,
    )  # fmt: skip

    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    tl.store(out_tile_ptr, acc / divisor[:, None], mask=out_mask)
    lse = (running_max + tl.log2(divisor)) * 0.6931471805599453
    tl.store(lse_tile_ptr, lse, mask=is_query)


def tune_prefill(
    nope_dim: int, rope_dim: int, value_dim: int, element_bytes: int
) -> dict[str, int]:
    """Two warpgroups on 128 queries, however short the spans are: a kernel for each length would
    compile in the middle of serving. float32, for checking, takes small tiles."""
    is_half = element_bytes == 2
    return {
        "BLOCK_M": 128 if is_half else 32,
        "BLOCK_N": 64 if is_half else 32,
        "BLOCK_K": max(next_power_of_2(nope_dim), 16),
        "BLOCK_R": max(next_power_of_2(rope_dim), 16),
        "BLOCK_V": max(next_power_of_2(value_dim), 16),
        "num_warps": 8 if is_half else 4,
        "num_stages": 3 if is_half else 1,
    }


def launch_latent_prefill(
    q_nope: Float[Tensor, "T H K"],
    q_rope: Float[Tensor, "T H R"],
    keys: Float[Tensor, "N H K"],
    rope_keys: Float[Tensor, "N R"],
    values: Float[Tensor, "N H V"],
    spans: Int[Tensor, "n 4"],
    max_num_queries: int,
    scale: float,
    out: Float[Tensor, "T H V"],
    lse: Float[Tensor, "T H"],
    *,
    is_causal: bool,
    continues: bool,
) -> None:
    nope_dim, rope_dim, value_dim = q_nope.shape[2], q_rope.shape[2], values.shape[2]
    tiles = tune_prefill(nope_dim, rope_dim, value_dim, q_nope.element_size())
    num_tiles = cdiv(max_num_queries, tiles["BLOCK_M"])
    _latent_prefill_kernel[(num_tiles, q_nope.shape[1], spans.shape[0])](
        q_nope_ptr=q_nope,
        q_rope_ptr=q_rope,
        keys_ptr=keys,
        rope_keys_ptr=rope_keys,
        values_ptr=values,
        spans_ptr=spans,
        out_ptr=out,
        lse_ptr=lse,
        stride_qt=q_nope.stride(0),
        stride_qh=q_nope.stride(1),
        stride_rt=q_rope.stride(0),
        stride_rh=q_rope.stride(1),
        stride_kn=keys.stride(0),
        stride_kh=keys.stride(1),
        stride_rn=rope_keys.stride(0),
        stride_vn=values.stride(0),
        stride_vh=values.stride(1),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        stride_lt=lse.stride(0),
        stride_lh=lse.stride(1),
        scale_log2=scale * LOG2_E,
        NOPE=nope_dim,
        ROPE=rope_dim,
        VALUE=value_dim,
        IS_CAUSAL=is_causal,
        CONTINUES=continues,
        **tiles,
    )
