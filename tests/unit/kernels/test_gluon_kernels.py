# SPDX-License-Identifier: Apache-2.0
"""The Gluon kernels for Hopper against their references, on the CPU emulator.

Each seed is another order of what a card may do in any order.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_cases import AttentionCase, make_attention_inputs, with_fp8_cache
from gluon_emulator import load_emulated
from gluon_emulator.values import Tile
from latent_cases import make_latent_inputs
from moe_cases import (
    AWKWARD_LOGITS,
    MXFP4_TOKENS,
    ExpertCase,
    MXFP4ByHand,
    make_expert_ids,
    make_expert_inputs,
    make_mxfp4_weights,
)
from pelton.kernels import hopper_product
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.fp8 import hopper_blocks
from pelton.kernels.fp8.linear import fp8_linear_reference
from pelton.kernels.fp8.quantize import quantize_fp8_reference
from pelton.kernels.fp8.scales import FP8Operands
from pelton.kernels.linear import linear_reference
from pelton.kernels.mla.reference import latent_attention_reference
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.fp8_product import fp8_expert_product_reference
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.routing import SoftmaxTopK, softmax_top_k_reference
from pelton.kernels.moe.sort_by_expert import RoutedRows, sort_by_expert_reference
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.paged_attention.triton_invariant import CHUNK
from pelton.kernels.triton_runtime import cdiv
from tolerance import assert_matches

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SEEDS = pytest.mark.parametrize("seed", range(3))
CPU, HALF, E4M3 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@SEEDS
@pytest.mark.parametrize(
    "case",
    [
        # Ends of blocks and of tiles, and a prefix of several tiles that are seen whole.
        AttentionCase(((1, 1), (63, 64), (64, 127), (65, 128), (70, 129)), 0, 4, 1, 64, 16),
        AttentionCase(((1, 500), (37, 400), (1, 20)), 1, 2, 1, 64, 32),
        AttentionCase(((130, 130), (2, 255), (1, 257)), 0, 4, 2, 128, 16),
        AttentionCase(((9, 140), (1, 128), (5, 5)), 0, 16, 2, 128, 128),
        # Groups that do not fill a warpgroup's rows; one that a single token fills.
        AttentionCase(((29, 200), (20, 20)), 0, 14, 2, 64, 128),
        AttentionCase(((5, 135),), 0, 64, 1, 128, 32),
        # Padding rows of one token and of several, first, last, and longer than a tile.
        AttentionCase(((3, 0), (2, 40), (40, 0), (1, 0)), 0, 4, 1, 64, 16),
        AttentionCase(((1, 90), (4, 0), (4, 300), (70, 0), (4, 5)), 1, 8, 2, 128, 16),
        # Rows without a token, as in a padded step, and sinks.
        AttentionCase(((1, 9), (40, 170), (3, 3), (0, 0), (0, 0)), 1, 16, 2, 64, 16, 0, True),
        # More rows than are counted at a time: the longest, and the last, among the first and not.
        AttentionCase(((1, 2),) * 33 + ((40, 70), (0, 0), (3, 3)), 33, 4, 1, 64, 16),
        AttentionCase(((0, 0),) * 33 + ((70, 130), (1, 5), (0, 0)), 0, 4, 1, 64, 16),
        AttentionCase(((70, 70),) + ((0, 0),) * 32 + ((1, 1),), 0, 4, 1, 64, 16),
    ],
    ids=str,
)
def test_prefill_attention(case, seed, generator) -> None:
    hopper = load_emulated("pelton.kernels.paged_attention.hopper_prefill", seed)
    inputs = make_attention_inputs(case, CPU, HALF, generator)
    q, cache_layer, rows, scale, window, sinks = inputs.arguments()
    assert hopper.can_use_hopper_prefill(q, cache_layer, window)
    out = torch.empty(q.shape, dtype=HALF)

    hopper.hopper_prefill_attention(q, cache_layer, rows, scale, sinks, 1.0, out)

    expected = paged_attention_reference(*inputs.arguments(torch.float32))
    decodes, others = slice(0, case.num_decodes), slice(case.num_decodes, None)
    assert_matches(out[others], expected[others], HALF)
    assert out[decodes].isnan().all()


@SEEDS
def test_prefill_attention_over_what_ends_in_zeros(seed, generator) -> None:
    """As FP8 contexts are unpacked: rows one behind the other, in blocks of a tile, some heads."""
    hopper = load_emulated("pelton.kernels.paged_attention.hopper_prefill", seed)
    case = AttentionCase(((1, 9), (40, 170), (2, 0), (3, 256)), 1, 24, 3, 64, 16, 0, True)
    inputs = make_attention_inputs(case, CPU, HALF, generator)
    q, cache_layer, rows, scale, _, sinks = inputs.arguments()
    tile = hopper.tune_hopper_prefill(64).block_n
    tables = torch.full((4, 2), 2**31 - 1, dtype=torch.int32)
    unpacked = torch.zeros(5, 2, tile, 2, 64, dtype=HALF)
    for row, first, context_len in ((1, 0, 170), (3, 3, 256)):
        tables[row] = torch.tensor([first, first + 1])
        for position in range(context_len):
            block, slot = rows.block_tables[row, position // 16], position % 16
            place = unpacked[first + position // tile, :, position % tile]
            place.copy_(cache_layer[block, :, slot, 1:])
    out = torch.empty(q.shape, dtype=HALF)

    hopper.hopper_prefill_attention(
        q[:, 8:], unpacked, replace(rows, block_tables=tables), scale, sinks[8:], 1.5, out[:, 8:],
        ends_in_zeros=True,
    )  # fmt: skip

    expected = paged_attention_reference(*inputs.arguments(torch.float32))
    assert_matches(out[1:, 8:], 1.5 * expected[1:, 8:], HALF)
    assert out[:, :8].isnan().all()


@SEEDS
def test_prefill_attention_of_padding_alone_is_zeros(seed, generator) -> None:
    hopper = load_emulated("pelton.kernels.paged_attention.hopper_prefill", seed)
    inputs = make_attention_inputs(AttentionCase(((3, 0),), 0, 4, 1, 64), CPU, HALF, generator)
    q, cache_layer, rows, scale, *_ = inputs.arguments()
    out = torch.empty(q.shape, dtype=HALF)

    hopper.hopper_prefill_attention(q, cache_layer, rows, scale, None, 1.0, out)

    assert (out == 0).all()


def _to_float16(words: Tile, is_paired: bool) -> Tile:
    """Each byte of an int32, the lowest first."""
    return Tile(words.data.view(torch.uint8).view(*words.shape, 4).view(E4M3).half())


@SEEDS
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("num_queries", [8, 16])
@pytest.mark.parametrize(
    "case",
    [
        # Ends of blocks, tiles and chunks; padding rows, and one whose blocks are longer.
        AttentionCase(((1, 1), (1, 16), (1, 33), (1, 300), (1, 0)), 5, 32, 4, 128, 16),
        AttentionCase(((1, 257), (1, 64)), 2, 32, 8, 64, 32, 0, True),
        # Windows that begin within a run of positions, a block and a chunk.
        AttentionCase(((1, 300), (1, 77), (1, 20)), 3, 32, 4, 64, 16, 45, True),
        # Blocks of fewer positions than a warp copies.
        AttentionCase(((1, 70), (1, 9)), 2, 4, 4, 128, 4),
        # Prompts: a tile of few tokens, the last one not full.
        AttentionCase(((5, 270), (3, 3), (2, 0)), 0, 16, 4, 64, 16),
        AttentionCase(((6, 40),), 0, 20, 4, 128, 16, 13),
    ],
    ids=str,
)
def test_attention_over_an_fp8_cache(case, num_queries, num_parts, seed, generator) -> None:
    fp8 = load_emulated("pelton.kernels.paged_attention.gluon_fp8", seed)
    fp8._to_float16 = _to_float16
    fp8._transpose_squares = lambda weights: weights
    inputs = with_fp8_cache(make_attention_inputs(case, CPU, HALF, generator), 1.0, 1.0)
    q, cache_layer, rows, scale, window, sinks = inputs.arguments()[:6]
    assert fp8.runs_gluon_fp8(q, cache_layer)
    group_size = case.num_heads // case.num_kv_heads
    tile_tokens = num_queries // group_size
    num_tiles = cdiv(rows.max_query_len, tile_tokens)
    num_chunks = cdiv(rows.max_context_len, CHUNK) + 1
    shape = q.shape[0], num_chunks, case.num_heads
    partial, sums = torch.zeros(*shape, case.head_dim), torch.zeros(*shape, 2)
    sums[..., 0] = -math.inf
    out = torch.empty(q.shape, dtype=HALF)

    fp8.launch_gluon_fp8(
        cache_layer,
        num_queries,
        num_tiles * num_parts,
        rows.num_rows,
        {
            "q_ptr": q,
            "block_tables_ptr": rows.block_tables,
            "query_starts_ptr": rows.query_starts,
            "context_lens_ptr": rows.context_lens,
            "sinks_ptr": q if sinks is None else sinks,
            "out_ptr": out,
            "partial_ptr": partial,
            "sums_ptr": sums,
            "stride_qt": q.stride(0),
            "stride_qh": q.stride(1),
            "stride_tabler": rows.block_tables.stride(0),
            "stride_ot": out.stride(0),
            "stride_oh": out.stride(1),
            "first_row": 0,
            "first_token": 0,
            "num_heads": case.num_heads,
            "num_parts": num_parts,
            "num_chunks": num_chunks,
            "scale_log2": scale / math.log(2),
            "v_scale": 1.0,
            "window": window or 2**31 - 1,
            "CHUNK": CHUNK,
            "BLOCK_SIZE": case.block_size,
            "GROUP_SIZE": group_size,
            "HEAD_DIM": case.head_dim,
            "TILE_TOKENS": tile_tokens,
            "IS_SPLIT": num_parts > 1,
            "HAS_SINKS": sinks is not None,
        },
    )

    if num_parts > 1:
        out = _fold_chunks(partial, sums, sinks)
    # The products' weights are rounded to float16.
    assert_matches(out, paged_attention_reference(*inputs.arguments(torch.float32)), HALF)


def _fold_chunks(partial: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    tops, totals = sums.unbind(-1)
    if sinks is not None:
        sink = (sinks.float() / math.log(2)).expand(tops.shape[0], 1, -1)
        tops, totals = torch.cat((tops, sink), 1), torch.cat((totals, torch.ones_like(sink)), 1)
        partial = torch.cat((partial, torch.zeros_like(partial[:, :1])), 1)
    weights = (tops - tops.amax(1, keepdim=True)).nan_to_num(-math.inf).exp2()
    total = (weights * totals).sum(1)
    mean = (weights[..., None] * partial).sum(1)
    return (mean / total.where(total > 0, 1.0)[..., None]).to(HALF)


def _merge_splits(partial: Tensor, lse: Tensor, out: Tensor, first_token: int) -> None:
    """In place of the Triton kernel: weights are 2^lse; what saw nothing is unwritten."""
    top = lse.amax(dim=2, keepdim=True)
    weights = torch.exp2(lse - torch.where(top.isneginf(), 0.0, top))[..., None]
    sums = torch.where(weights == 0, 0.0, weights * partial).sum(dim=2)
    total = weights.sum(dim=2)
    out[first_token : first_token + len(sums)] = sums / torch.where(total == 0, 1.0, total)


LATENT_CASES = [
    # A single latent, the ends of tiles and of blocks.
    (((1, 1), (1, 64), (1, 65), (1, 127), (1, 128)), 5, 64, 512, 64, 16),
    # Splits without a latent, a padding row, and a last tile that is half empty.
    (((1, 300), (1, 0), (1, 3)), 3, 96, 512, 64, 64),
    (((1, 200),), 1, 128, 512, 64, 128),
    # Tiles of several tokens, of which one sees nothing in the last split.
    (((1, 71), (5, 70), (2, 128), (3, 0)), 1, 64, 512, 64, 32),
    (((2, 65), (3, 260)), 0, 96, 512, 64, 16),
]


@SEEDS
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention(case, num_splits, seed, generator, monkeypatch) -> None:
    inputs = make_latent_inputs(case, CPU, HALF, generator)
    q_latent, q_rope, cache_layer, rows, scale = inputs
    (part, tokens, query_len), *_ = reversed(list(rows.parts(q_latent.shape[0])))
    num_tiles = (part.stop - part.start) * -(-query_len * q_latent.shape[1] // 64)
    hopper = load_emulated("pelton.kernels.mla.hopper", seed, num_splits * num_tiles)
    monkeypatch.setattr(hopper, "merge_splits", _merge_splits)
    assert hopper.suits_hopper_latent(q_latent, q_rope, cache_layer)
    out = torch.empty(q_latent.shape, dtype=HALF)

    hopper.hopper_latent_rows(
        q_latent, q_rope, cache_layer, rows, part, tokens, query_len, scale, out, may_split=True
    )

    wide = (q_latent.float(), q_rope.float(), cache_layer.float(), rows, scale)
    assert_matches(out[tokens], latent_attention_reference(*wide)[tokens], HALF)
    assert out[: tokens.start].isnan().all()


@SEEDS
def test_latent_attention_that_must_not_split_gives_the_same_bits(seed, generator) -> None:
    """A row alone, and among others, on a card of any size."""
    rows = ((1, 130), (1, 17), (1, 64))
    q_latent, q_rope, cache_layer, many, scale = make_latent_inputs(
        (rows, 3, 64, 512, 64, 16), CPU, HALF, generator
    )
    one = replace(
        many, block_tables=many.block_tables[:1], query_starts=many.query_starts[:2],
        context_lens=many.context_lens[:1], num_decodes=1,
    )  # fmt: skip
    outs = []
    for batch, num_multiprocessors in ((many, 3), (one, 100)):
        hopper = load_emulated("pelton.kernels.mla.hopper", seed, num_multiprocessors)
        part = slice(0, batch.num_rows)
        outs.append(torch.empty(q_latent.shape, dtype=HALF))
        hopper.hopper_latent_rows(
            q_latent, q_rope, cache_layer, batch, part, part, 1, scale, outs[-1], may_split=False
        )

    assert outs[0].isfinite().all()
    assert torch.equal(outs[1][0], outs[0][0])


# An expert's last tile with rows of its second half, with none, and with a single one; experts
# without rows; more blocks of inputs than stages; features that end in the middle of a strip.
EXPERT_CASES = [
    ExpertCase(1, 4, 2, 128, 128),
    ExpertCase(97, 3, 2, 640, 192),
    ExpertCase(65, 4, 2, 256, 128, "one"),
    ExpertCase(129, 3, 1, 768, 384, "one"),
    ExpertCase(150, 8, 3, 384, 128, "last"),
]


def check_tall_product(case, seed, generator, gate) -> None:
    """The first product with a gate, the second without: both from `hidden_size` inputs."""
    ids = make_expert_ids(case, generator)
    routed = sort_by_expert_reference(ids, case.num_experts, 128)
    num_rows = routed.num_rows if gate is None else case.num_tokens
    num_parts = 1 if gate is None else 2
    values = torch.randn(num_rows, case.hidden_size, generator=generator)
    x, x_scales = quantize_fp8_reference(values, 128, math.inf)
    shape = case.num_experts, num_parts * case.ffn_size, case.hidden_size
    weight = torch.randn(shape, generator=generator).to(E4M3)
    for expert in set(range(case.num_experts)) - set(ids.flatten().tolist()):
        weight[expert] = math.nan
    shape = case.num_experts, num_parts * -(-case.ffn_size // 128), case.hidden_size // 128
    scales = torch.rand(shape, generator=generator)
    hopper = load_emulated("pelton.kernels.moe.fp8_tall", seed)
    assert hopper.suits_tall_product(x, routed, weight, HALF)
    expected = fp8_expert_product_reference(
        x, x_scales, routed, weight, scales, torch.float32, gate
    )
    out = torch.empty(expected.shape, dtype=HALF)

    hopper.launch_tall_product(x, x_scales, routed, weight, scales, gate, out)

    assert_matches(out, expected, HALF)


MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGN_BITS = torch.tensor([7, 15, 23, 31, 3, 11, 19, 27])


def read_codes(words: Tile, scales: Tensor) -> Tensor:
    """float32 [F, 128], inputs in their order, of what `tile_weights` made of them; `scales` [F,
    16]. The kernels do it with instructions, in another order."""
    codes = words.data[:, :, None]
    magnitudes = MAGNITUDES[(codes >> 4 * torch.arange(8) & 7).long()]
    values = torch.where((codes >> SIGN_BITS & 1).bool(), -magnitudes, magnitudes)
    # Behind the last block a scale is any number, and its codes are zeros.
    return (values * scales[:, :, None]).where(values != 0, 0.0).flatten(1)


def unpack_to_e4m3(words: Tile, exponents: Tile) -> Tile:
    return Tile(read_codes(words, torch.exp2(exponents.data.float() - 5)).to(E4M3))


def unpack_to_bfloat16(words: Tile, powers: Tile) -> Tile:
    return Tile(read_codes(words, (powers.data << 16).view(torch.float32)).to(HALF))


def gather_by_hand(x: Tensor, routed: RoutedRows, num_chunks: int, *, is_gathered: bool) -> Tensor:
    if is_gathered:
        x = x[routed.order.long() // routed.top_k]
    return torch.nn.functional.pad(x, (0, num_chunks * 128 - x.shape[1]))


def split_rows_by_hand(
    x: Tensor, routed: RoutedRows, *, is_gathered: bool
) -> tuple[Tensor, Tensor]:
    x = gather_by_hand(x, routed, cdiv(x.shape[1], 128), is_gathered=is_gathered).float()
    scales = torch.exp2(x.abs().amax(dim=1).log2().floor() - 7)
    high = (x / scales[:, None]).to(E4M3)
    low = ((x / scales[:, None] - high.float()) * 16).to(E4M3)
    parts = torch.stack((high.view(torch.uint8), low.view(torch.uint8)), dim=1)
    return parts.view(E4M3), scales


@SEEDS
@pytest.mark.parametrize("tile_rows", [16, 32])
@pytest.mark.parametrize(
    ("num_programs", "case"),
    [
        # Fewer tiles than warpgroups, and than programs; several experts in one program.
        (1, ExpertCase(1, 4, 2, 64, 32)),
        (3, ExpertCase(40, 6, 3, 192, 96)),
        (40, ExpertCase(40, 16, 3, 192, 64, "last")),
        (7, ExpertCase(37, 8, 2, 320, 160, "one")),
        (1, ExpertCase(30, 9, 4, 448, 160, has_bias=False)),
    ],
    ids=str,
)
def test_mxfp4_products_of_few_rows(
    num_programs, case, tile_rows, seed, generator, monkeypatch
) -> None:
    """But for how codes become numbers, and activations two of them."""
    hopper = load_emulated("pelton.kernels.moe.mxfp4_product.hopper", seed, num_programs)
    monkeypatch.setitem(hopper.describe_words.__globals__, "unpack", unpack_to_e4m3)
    monkeypatch.setattr(hopper, "split_rows", split_rows_by_hand)
    monkeypatch.setattr(hopper, "tune", lambda *sizes: 2 + seed)
    check_mxfp4_products(hopper, case, tile_rows, generator)


@SEEDS
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        # Last tiles of a row more than half.
        ExpertCase(97, 2, 1, 64, 32, "one"),
        ExpertCase(193, 3, 1, 832, 160, "one", has_bias=False),
        # Tiles half full and less, and strips that end behind a tile of 64 features.
        ExpertCase(150, 4, 2, 192, 96),
    ],
    ids=str,
)
def test_mxfp4_products_of_many_rows(case, tile_rows, seed, generator, monkeypatch) -> None:
    """But for how codes become numbers, and how activations are brought in their order."""
    hopper = load_emulated("pelton.kernels.moe.mxfp4_product.hopper", seed)
    namespace = hopper.launch_tall_product.__globals__
    monkeypatch.setitem(namespace, "_unpack", unpack_to_bfloat16)
    monkeypatch.setitem(namespace, "_gather_inputs", gather_by_hand)
    check_mxfp4_products(hopper, case, tile_rows, generator)


@SEEDS
@pytest.mark.parametrize(
    "case",
    [
        # Last tiles of a row more than half, and of less; strips that end behind 64 features.
        ExpertCase(97, 2, 1, 64, 32, "one"),
        ExpertCase(150, 4, 2, 832, 160, has_bias=False),
    ],
    ids=str,
)
def test_mxfp4_products_of_many_split_rows(case, seed, generator, monkeypatch) -> None:
    """As where results may not depend on the number of rows; but for what few rows do by hand."""
    hopper = load_emulated("pelton.kernels.moe.mxfp4_product.hopper", seed)
    monkeypatch.setitem(hopper.describe_words.__globals__, "unpack", unpack_to_e4m3)
    monkeypatch.setattr(hopper, "split_rows", split_rows_by_hand)
    with batch_invariant():
        check_mxfp4_products(hopper, case, 64, generator)


def check_mxfp4_products(hopper, case: ExpertCase, tile_rows: int, generator) -> None:
    inputs = make_expert_inputs(case, CPU, HALF, generator)
    packed = make_mxfp4_weights(case, CPU, generator)
    routed = sort_by_expert_reference(inputs.expert_ids, case.num_experts, tile_rows)
    gate_up = tile_weights(packed.gate_up_blocks, packed.gate_up_scales)
    down = tile_weights(packed.down_blocks, packed.down_scales)
    gate = Gate(alpha=1.702, limit=1.5, offset=1.0)

    hidden = hopper.mxfp4_gate_up_product_hopper(
        inputs.x, routed, *gate_up, inputs.gate_up_bias, gate
    )
    rows = hopper.mxfp4_down_product_hopper(hidden, routed, *down, inputs.down_bias)

    weights = MXFP4ByHand(packed.gate_up_blocks, packed.gate_up_scales)
    bias = inputs.gate_up_bias
    expected = expert_product_reference(inputs.x.float(), routed, weights, bias, gate)
    assert_matches(hidden, expected, HALF)
    weights = MXFP4ByHand(packed.down_blocks, packed.down_scales)
    expected = expert_product_reference(hidden.float(), routed, weights, inputs.down_bias)
    assert_matches(rows, expected, HALF)


def unpack_for_one_token(words: Tile, exponents: Tile) -> Tile:
    """In the order in which the kernel has the activations."""
    spots = torch.arange(128)
    inputs = spots // 4 % 4 * 32 + spots // 32 * 8 + spots // 16 % 2 * 4 + spots % 4
    return Tile(unpack_to_e4m3(words, exponents).data[:, inputs])


def load_one_token_kernel(warpgroups: int):
    one = load_emulated("pelton.kernels.moe.mxfp4_product.hopper_one", seed=0)
    one.unpack = unpack_for_one_token
    one.tune = lambda *sizes: warpgroups
    return one


@pytest.mark.parametrize("form", ["one warpgroup", "two", "in order"])
@pytest.mark.parametrize("case", MXFP4_TOKENS, ids=str)
def test_mxfp4_products_of_one_token(case, form, generator) -> None:
    """But for how codes become numbers."""
    one = load_one_token_kernel(2 if form == "two" else 1)
    inputs = make_expert_inputs(case, CPU, HALF, generator)
    packed = make_mxfp4_weights(case, CPU, generator)
    gate_up = tile_weights(packed.gate_up_blocks, packed.gate_up_scales)
    down = tile_weights(packed.down_blocks, packed.down_scales)
    gate = Gate(alpha=1.702, limit=1.5, offset=1.0)
    logits = -torch.rand(1, case.num_experts, generator=generator)
    logits[0, inputs.expert_ids[0].long()] = torch.arange(case.top_k, 0.0, -1.0)
    token = one.LoneToken.of(SoftmaxTopK(logits.to(HALF), case.top_k))
    hidden = torch.full((case.top_k, case.ffn_size), math.nan, dtype=HALF)
    rows = torch.full((case.top_k, case.hidden_size), math.nan, dtype=HALF)

    with batch_invariant(wanted=form == "in order"):
        one.launch_one_token_product(inputs.x, token, *gate_up, inputs.gate_up_bias, gate, hidden)
        one.launch_one_token_product(hidden, token, *down, inputs.down_bias, None, rows)

    _, expected = softmax_top_k_reference(token.logits, case.top_k)
    assert_matches(token.weights, expected, torch.float32)
    places = torch.arange(case.top_k, dtype=torch.int32)
    tiles = torch.stack((inputs.expert_ids[0], places, places + 1), dim=1)
    routed = RoutedRows(inputs.expert_ids, places, tiles, 1)
    weights = MXFP4ByHand(packed.gate_up_blocks, packed.gate_up_scales)
    expected = expert_product_reference(
        inputs.x.float(), routed, weights, inputs.gate_up_bias, gate
    )
    assert_matches(hidden, expected, HALF)
    weights = MXFP4ByHand(packed.down_blocks, packed.down_scales)
    expected = expert_product_reference(hidden.float(), routed, weights, inputs.down_bias)
    assert_matches(rows, expected, HALF)


@pytest.mark.parametrize(
    "logits", [*AWKWARD_LOGITS, [*range(40, 0, -1)], [*range(-100, 32)]], ids=str
)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_products_of_one_token_choose_as_softmax_top_k_does(logits, top_k) -> None:
    """Each expert's result is its number: weights are zeros, and a bias is what is left."""
    one = load_one_token_kernel(1)
    num_experts = len(logits)
    blocks = torch.zeros(num_experts, 64, 1, 16, dtype=torch.uint8)
    words = tile_weights(blocks, torch.full((num_experts, 64, 1), 127, dtype=torch.uint8))
    bias = torch.arange(float(num_experts))[:, None].expand(-1, 64).to(HALF).contiguous()
    routing = SoftmaxTopK(torch.tensor([logits], dtype=torch.float32), top_k)
    token = one.LoneToken.of(routing)
    rows = torch.full((top_k, 64), math.nan, dtype=HALF)
    hidden = torch.full((top_k, 32), math.nan, dtype=HALF)
    x = torch.zeros(1, 32, dtype=HALF)

    one.launch_one_token_product(x, token, *words, None, Gate(), hidden)
    one.launch_one_token_product(hidden, token, *words, bias, None, rows)

    # A NaN has no order: the kernels count it as 0.
    ordered = routing.logits.nan_to_num(0, neginf=-math.inf)
    expected_ids, expected_weights = softmax_top_k_reference(ordered, top_k)
    assert rows[:, 0].tolist() == expected_ids[0].tolist()
    assert_matches(token.weights, expected_weights, torch.float32)


@SEEDS
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_tall_gate_up_product(case, seed, generator) -> None:
    check_tall_product(case, seed, generator, Gate(alpha=1.702, limit=7.0, offset=1.0))


@SEEDS
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_tall_down_product(case, seed, generator) -> None:
    check_tall_product(case, seed, generator, None)


@pytest.mark.parametrize("tune", [hopper_product.tune, hopper_blocks.tune], ids=["bf16", "fp8"])
def test_the_tile_of_a_product_is_one_that_the_start_has_met(tune) -> None:
    for num_tokens in range(65, 8193):
        met = 2 ** (num_tokens - 1).bit_length() // 2 + 1
        for out_features in (4096, 27_648, 57_344):
            tile = tune(num_tokens, out_features, 132)
            assert tile == tune(met, out_features, 132), (num_tokens, out_features)


@SEEDS
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["half", "fp32"])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features", "block_t"),
    # One tile and less; more chunks than stages; more tiles than programs; half a chunk.
    [
        (1, 64, 64, 64),
        (64, 128, 40, 64),
        (131, 200, 640, 64),
        (70, 333, 136, 128),
        (300, 300, 72, 256),
    ],
)
def test_product(num_tokens, out_features, in_features, block_t, dtype, seed, generator) -> None:
    x = torch.randn(num_tokens, in_features + 8, generator=generator).to(HALF)[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator).to(HALF)
    bias = None
    if dtype is HALF:
        bias = 20 * torch.randn(out_features, generator=generator).to(HALF)
    hopper = load_emulated("pelton.kernels.hopper_product", seed)
    hopper.tune = lambda *sizes: block_t
    assert hopper.runs_hopper_product(x, weight)
    out = torch.empty((num_tokens, out_features), dtype=dtype)

    hopper.launch_hopper_product(x, weight, bias, out)

    expected = linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    assert_matches(out, expected, dtype)


@SEEDS
@pytest.mark.parametrize("half", [HALF, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["half", "fp32"])
@pytest.mark.parametrize(
    ("out_features", "in_features", "held", "num_warps"),
    # Whole programs, which may have a bias, and loads, and less of both; one row, and one piece in
    # part; rows of a pair in registers and in shared memory; all rows in one of them.
    [
        (16, 2048, 4, 4),
        (24, 776, 5, 1),
        (19, 2880, 4, 4),
        (1, 8, 2, 4),
        (23, 1032, 3, 2),
        (9, 520, 8, 1),
        (10, 776, 0, 1),
    ],
)
def test_product_of_one_token(
    out_features, in_features, held, num_warps, dtype, half, seed, generator
) -> None:
    """Of rows that lie apart, with a bias where the result is rounded."""
    vector = load_emulated("pelton.kernels.hopper_vector", seed)
    vector.FEW_ROWS = 0
    vector.tune_hopper_vector = lambda *sizes: vector.HopperVectorTiles(held, num_warps)
    x = torch.randn(1, in_features, generator=generator).to(half)
    weight = torch.full((out_features, in_features + 8), math.nan, dtype=half)[:, :in_features]
    weight.copy_(torch.randn(out_features, in_features, generator=generator))
    has_bias = dtype is None and out_features % vector.ROWS == 0
    bias = 20 * torch.randn(out_features, generator=generator).to(half) if has_bias else None
    assert vector.suits_hopper_vector(x, weight, bias)
    out = torch.empty((1, out_features), dtype=dtype or half)

    vector.launch_hopper_vector(x, weight, bias, out)

    expected = linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    assert_matches(out, expected, dtype or half)


def test_product_of_one_token_stays_with_its_own_runs() -> None:
    """What the matrix units multiply beside is left out, be it infinite."""
    vector = load_emulated("pelton.kernels.hopper_vector", seed=0)
    x, weight = torch.zeros(1, 2048, dtype=HALF), torch.ones(8, 2048, dtype=HALF)
    x[0, 100], x[0, 1500] = 2.0, math.inf
    weight[:, 100], weight[3, 1500] = math.inf, -1.0
    out = torch.empty(1, 8)

    vector.launch_hopper_vector(x, weight, None, out)

    assert out.isnan()[0].tolist() == [row == 3 for row in range(8)]
    assert (out[0] == math.inf).sum() == 7


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    # GPT-OSS's attention and head, Llama-8B's gate and up; a router; rows longer than a program's.
    [
        *[((5120, 2880), True), ((201_088, 2880), True), ((28_672, 4096), True)],
        *[((128, 2880), False), ((4096, 14_336), False)],
    ],
)
def test_products_of_one_token_whose_rows_a_program_holds(shape, is_taken) -> None:
    vector = load_emulated("pelton.kernels.hopper_vector", seed=0)
    weight = torch.empty(shape[0] * 8 + shape[1], dtype=HALF).as_strided(shape, (8, 1))
    x = torch.empty(1, shape[1], dtype=HALF)

    assert vector.suits_hopper_vector(x, weight, None) is is_taken


def test_products_of_one_token_are_copied_from_whole_places() -> None:
    """16 bytes at a time; of the same numbers as the token's."""
    vector = load_emulated("pelton.kernels.hopper_vector", seed=0)
    vector.FEW_ROWS = 0
    x, wide = torch.zeros(1, 64, dtype=HALF), torch.zeros(9, 80, dtype=HALF)
    weight, bias = wide[:8, :64], torch.zeros(12, dtype=HALF)
    suits = vector.suits_hopper_vector

    assert suits(x, wide[:, :64], None)
    assert suits(x, wide[:, 8:72], None)
    assert not suits(x, wide[:, 4:68], None)
    assert not suits(x[:, :60], wide[:, :60], None)
    assert not suits(x, torch.zeros(9, 68, dtype=HALF)[:, :64], None)
    assert not suits(x, wide[:, :64].half(), None)
    assert suits(x, weight, bias[:8])
    assert not suits(x, weight, bias[4:])
    assert not suits(x, weight, bias[:8].float())
    assert not suits(x, wide[:, :64], bias[:9])


@SEEDS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features"),
    # One tile and less; more blocks than stages; more tiles than programs.
    [(1, 64, 128), (128, 128, 128), (131, 200, 896), (300, 333, 256)],
)
def test_fp8_linear(num_tokens, out_features, in_features, has_bias, seed, generator) -> None:
    values = torch.randn(num_tokens, in_features, generator=generator)
    x, x_scales = quantize_fp8_reference(values, in_features, math.inf)
    weight = torch.randn(out_features, in_features, generator=generator).to(E4M3)
    weight_scales = torch.rand(out_features, 1, generator=generator)
    bias = 20 * torch.randn(out_features, generator=generator).to(HALF) if has_bias else None
    operands = FP8Operands(x, x_scales, weight, weight_scales, bias, torch.float32)
    hopper = load_emulated("pelton.kernels.fp8.hopper_linear", seed)
    assert hopper.runs_hopper_linear(operands)
    out = torch.empty((num_tokens, out_features), dtype=HALF)

    hopper.launch_hopper_linear(operands, out)

    assert_matches(out, fp8_linear_reference(operands), HALF)


@SEEDS
@pytest.mark.parametrize("block_f", [64, 128, 256])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features", "has_bias"),
    # One tile and less; more blocks than stages; more tiles than programs; a last tile whose second
    # part has no features.
    [(1, 64, 128, True), (128, 128, 128, False), (131, 200, 896, True), (300, 720, 256, False)],
)
def test_fp8_linear_of_blocks(
    num_tokens, out_features, in_features, has_bias, block_f, seed, generator
) -> None:
    values = torch.randn(num_tokens, in_features, generator=generator)
    x, x_scales = quantize_fp8_reference(values, 128, math.inf)
    weight = torch.randn(out_features, in_features, generator=generator).to(E4M3)
    weight_scales = torch.rand(-(-out_features // 128), in_features // 128, generator=generator)
    bias = 20 * torch.randn(out_features, generator=generator).to(HALF) if has_bias else None
    operands = FP8Operands(x, x_scales, weight, weight_scales, bias, torch.float32)
    hopper = load_emulated("pelton.kernels.fp8.hopper_blocks", seed)
    hopper.tune = lambda *sizes: block_f
    out = torch.empty((num_tokens, out_features), dtype=HALF)

    hopper.launch_hopper_blocks(operands, out)

    assert_matches(out, fp8_linear_reference(operands), HALF)
