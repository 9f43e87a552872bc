# SPDX-License-Identifier: Apache-2.0
"""What `--deterministic` runs: a row's bits are the same in any batch, chunk and form of a step."""

import os

import pytest
import torch
from torch import Tensor

from moe_cases import ExpertCase
from pelton.core.batch import AttentionRows
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.fp8.linear import fp8_linear
from pelton.kernels.fp8.quantize import quantize_fp8
from pelton.kernels.head_product import HEAD_PRODUCT, head_product, head_product_reference
from pelton.kernels.linear import LINEAR, linear, linear_reference
from pelton.kernels.mla.op import latent_attention
from pelton.kernels.moe.expert_product.op import down_product, gate_up_product
from pelton.kernels.moe.fp8_product import fp8_down_product, fp8_gate_up_product
from pelton.kernels.moe.gate import SWIGLU, Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.mxfp4_product.op import (
    mxfp4_down_product,
    mxfp4_gate_up_product,
    route_rows,
    takes_tiles,
)
from pelton.kernels.moe.router_product import (
    ROUTER_PRODUCT,
    router_product,
    router_product_reference,
)
from pelton.kernels.moe.routing import SoftmaxTopK, softmax_top_k
from pelton.kernels.moe.sort_by_expert import sort_by_expert
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.kernels.paged_attention.op import paged_attention
from pelton.kernels.paged_attention.triton_invariant import CHUNK
from pelton.kernels.rms_norm import add_rms_norm
from tolerance import assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# The interpreter computes products of bfloat16 tiles wrongly; float32 stands for it there, whose
# tiles are small, so that few rows fill many.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
E4M3 = torch.float8_e4m3fn
PIECES = [(0, 1), (5, 6), (3, 20), (30, 70)]
MANY_PIECES = [*PIECES, (7, 140), (100, 300), (0, 600), (777, 2048)]
NUM_ROWS = 70 if IS_INTERPRETED else 4096


@pytest.fixture(autouse=True)
def _invariant():
    with batch_invariant():
        yield


def pieces() -> list[tuple[int, int]]:
    return PIECES if IS_INTERPRETED else MANY_PIECES


def assert_rows_do_not_depend_on_their_number(run, num_rows: int = NUM_ROWS) -> None:
    """`run(start, end)` gives the results of those rows."""
    whole = run(0, num_rows)
    assert whole.isfinite().all()
    for start, end in pieces():
        assert torch.equal(run(start, end), whole[start:end]), (start, end)


PRODUCT_SHAPES = [(192, 40), (61, 5), (70, 130), (136, 1000)]
LARGE_PRODUCT_SHAPES = [
    (4096, 6144),
    (14336, 4096),
    (2880, 5120),
    (576, 576),
    (4096, 28672),
    (2880, 128),
    (7168, 256),
]


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 65])
@pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
def test_products(shape, num_tokens, dtype, device, generator, interpretable) -> None:
    in_features, out_features = shape
    x = torch.randn(num_tokens, in_features + 8, generator=generator).to(device, dtype)
    x = x[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
    bias = torch.randn(out_features, generator=generator).to(device, dtype)

    actual = LINEAR.named("invariant")(x, weight, bias)
    logits = ROUTER_PRODUCT.named("triton")(x, weight)

    assert_matches(actual, linear_reference(x.float(), weight.float(), bias.float()), dtype)
    assert_matches(logits, router_product_reference(x, weight), torch.float32)


@DTYPES
@pytest.mark.parametrize("is_transposed", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_head_product(num_tokens, is_transposed, dtype, device, generator, interpretable) -> None:
    x = torch.randn(num_tokens, 3, 40 + 8, generator=generator).to(device, dtype)[:, :, :40]
    shape = (3, 72, 40) if is_transposed else (3, 40, 72)
    weight = torch.randn(shape, generator=generator).to(device, dtype)
    weight = weight.transpose(1, 2) if is_transposed else weight

    actual = HEAD_PRODUCT.named("triton")(x, weight)

    assert_matches(actual, head_product_reference(x.float(), weight.float()), dtype)


def randn(shape, device, generator, dtype=DTYPE) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator(device).manual_seed(3), device=device)
    return values.to(dtype)


@pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
def test_rows_of_products(shape, device, generator, interpretable) -> None:
    check_rows_of_products(shape, device, generator)


@pytest.mark.parametrize("shape", LARGE_PRODUCT_SHAPES, ids=str)
def test_rows_of_large_products(shape, device, generator) -> None:
    check_rows_of_products(shape, device, generator)


def check_rows_of_products(shape, device, generator) -> None:
    in_features, out_features = shape
    x = randn((NUM_ROWS, in_features), device, generator)
    weight = randn((out_features, in_features), device, generator)
    bias = randn((out_features,), device, generator)

    assert_rows_do_not_depend_on_their_number(lambda a, b: linear(x[a:b], weight, bias))
    assert_rows_do_not_depend_on_their_number(lambda a, b: router_product(x[a:b], weight))


def test_rows_of_head_products(device, generator, interpretable) -> None:
    heads, inner, columns = (3, 40, 24) if IS_INTERPRETED else (128, 128, 512)
    x = randn((NUM_ROWS, heads, inner), device, generator)
    weight = randn((heads, inner, columns), device, generator)

    assert_rows_do_not_depend_on_their_number(lambda a, b: head_product(x[a:b], weight))


def check_rows_of_fp8_products(shape, has_blocks, has_bias, device, generator) -> None:
    in_features, out_features = shape
    x = randn((NUM_ROWS, in_features), device, generator)
    weight = randn((out_features, in_features), device, generator).to(E4M3)
    group = 128 if has_blocks else in_features
    scales_shape = (-(-out_features // 128), -(-in_features // 128))
    scales_shape = scales_shape if has_blocks else (out_features, 1)
    scales = randn(scales_shape, device, generator, torch.float32).abs()
    bias = 10 * randn((out_features,), device, generator) if has_bias else None

    def run(start: int, end: int) -> Tensor:
        quantized = quantize_fp8(x[start:end], group)
        return fp8_linear(*quantized, weight, scales, bias, DTYPE)

    assert_rows_do_not_depend_on_their_number(run)


@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
def test_rows_of_fp8_products(has_blocks, device, generator, interpretable) -> None:
    shape = (300, 130) if IS_INTERPRETED else (7168, 2112)
    check_rows_of_fp8_products(shape, has_blocks, False, device, generator)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("shape", [(4096, 6144), (14336, 4096), (384, 200), (392, 72)], ids=str)
def test_rows_of_large_fp8_products(shape, has_blocks, has_bias, device, generator) -> None:
    check_rows_of_fp8_products(shape, has_blocks, has_bias, device, generator)


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4", "mxfp4 without biases"])
def test_rows_of_experts(kind, device, generator, interpretable) -> None:
    """With gate, down product and routing, whatever share of an expert's tile a row has. FP8 in
    whole blocks of inputs, which Hopper's kernel for many rows asks for."""
    experts, hidden = (6, 64) if IS_INTERPRETED else (32, 2944 if kind == "fp8" else 2880)
    ffn = hidden
    case = ExpertCase(NUM_ROWS, experts, 2 if IS_INTERPRETED else 4, hidden, ffn)
    logits = torch.randn(NUM_ROWS, experts, generator=generator).to(device)
    expert_ids, shares = softmax_top_k(logits, case.top_k)
    x = randn((NUM_ROWS, hidden), device, generator)
    gate_up = randn((experts, 2 * ffn, hidden), device, generator)
    down = randn((experts, hidden, ffn), device, generator)
    gate_up_scale = torch.rand((experts, 2 * -(-ffn // 128), -(-hidden // 128)), device=device)
    down_scale = torch.rand((experts, -(-hidden // 128), -(-ffn // 128)), device=device)

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), device=device)
        powers = torch.randint(118, 122, (experts, rows, columns // 32), device=device)
        weights = blocks.to(torch.uint8), powers.to(torch.uint8)
        return tile_weights(*weights) if takes_tiles(weights[0], DTYPE) else weights

    packed_gate_up, packed_down = packed(2 * ffn, hidden), packed(hidden, ffn)
    gate = Gate(alpha=1.702, limit=7.0, offset=1.0)
    biases = (
        (
            randn((experts, 2 * ffn), device, generator),
            randn((experts, hidden), device, generator),
        )
        if kind == "mxfp4"
        else (None, None)
    )

    def run(start: int, end: int) -> Tensor:
        tokens = x[start:end]
        if "mxfp4" in kind:
            routing = SoftmaxTopK(logits[start:end], case.top_k)
            routed, weights = route_rows(routing, packed_gate_up[0], packed_down[0])
        else:
            routed = sort_by_expert(expert_ids[start:end].contiguous(), experts)
        if kind == "plain":
            middle = gate_up_product(tokens, routed, gate_up, None, gate) / hidden
            rows = down_product(middle, routed, down, None)
        elif kind == "fp8":
            middle = fp8_gate_up_product(
                *quantize_fp8(tokens, 128), routed, gate_up.to(E4M3), gate_up_scale, SWIGLU, DTYPE
            )
            rows = fp8_down_product(
                *quantize_fp8(middle, 128), routed, down.to(E4M3), down_scale, DTYPE
            )
        else:
            middle = mxfp4_gate_up_product(tokens, routed, *packed_gate_up, biases[0], gate)
            rows = mxfp4_down_product(middle, routed, *packed_down, biases[1])
            assert torch.equal(weights, shares[start:end])
        return rows.view(end - start, -1)

    assert_rows_do_not_depend_on_their_number(run)


def test_rows_of_routing(device, generator, interpretable) -> None:
    logits = randn((NUM_ROWS, 128), device, generator)

    assert_rows_do_not_depend_on_their_number(lambda a, b: softmax_top_k(logits[a:b], 4)[1])
    assert_rows_do_not_depend_on_their_number(lambda a, b: softmax_top_k(logits[a:b], 4)[0])


def test_rows_of_sums_in_a_norm(device, generator, interpretable) -> None:
    rows, weight = randn((4 * NUM_ROWS, 384), device, generator), randn((384,), device, generator)
    shares = torch.rand(NUM_ROWS, 4, generator=generator).to(device)
    residual = randn((NUM_ROWS, 384), device, generator).float()

    def run(start: int, end: int) -> Tensor:
        parts = WeightedRows(rows[4 * start : 4 * end], shares[start:end])
        return add_rms_norm(parts, residual[start:end], weight, 1e-5)[0]

    assert_rows_do_not_depend_on_their_number(run)


LENGTH = CHUNK + 20 if IS_INTERPRETED else 1800


def rows_of(spans: list[tuple[int, int]], table: Tensor, num_decodes: int) -> AttentionRows:
    """Rows of (first position, tokens), all of one request."""
    counts = [count for _, count in spans]
    contexts = [start + count for start, count in spans]
    return AttentionRows(
        block_tables=table.expand(len(spans), -1).contiguous(),
        query_starts=torch.tensor([0, *counts]).cumsum(0).to(table.device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32).to(table.device),
        num_decodes=num_decodes,
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )


def cut_steps() -> list[tuple[list[tuple[int, int]], int]]:
    """(rows, decodes) of steps that compute the same positions in other ways."""
    last = LENGTH - 1
    places = [0, 15, CHUNK - 1, CHUNK, last]
    decodes = [(place, 1) for place in places]
    steps = [
        (decodes, len(places)),
        ([(last, 1), (3, 40), (LENGTH - 60, 60)], 1),
        ([(last - 3, 4)], 0),
        ([(last, 1)], 1),
        ([(last, 1)], 0),
    ]
    if IS_INTERPRETED:
        return steps
    many = [(place, 1) for place in range(0, LENGTH, 7)]
    return [
        *steps,
        *(([decode], 1) for decode in decodes),
        *(([decode], 0) for decode in decodes),
        (many, len(many)),
        ([(0, 7), (7, 64), (71, LENGTH - 71)], 0),
        ([(place, 3) for place in places[:-1]], 0),
    ]


def assert_positions_have_one_result(attend, q: Tensor, table: Tensor) -> None:
    """`attend(q, rows)` over the prompt in one piece, and over parts of it in other steps."""
    whole = attend(q, rows_of([(0, LENGTH)], table, 0))
    assert whole.isfinite().all()
    for spans, num_decodes in cut_steps():
        tokens = [place for start, count in spans for place in range(start, start + count)]
        index = torch.tensor(tokens, device=q.device)
        actual = attend(q[index], rows_of(spans, table, num_decodes))
        assert torch.equal(actual, whole[index]), (spans[:4], num_decodes)


@pytest.mark.parametrize("kv", ["same", "fp8"])
@pytest.mark.parametrize(
    ("window", "has_sinks"), [(0, False), (0, True), (40, True), (260, False)], ids=str
)
@pytest.mark.parametrize(
    "heads", [(4, 2, 32), (32, 8, 128), (64, 8, 64), (24, 8, 64), (40, 8, 128)], ids=str
)
def test_attention_of_a_position_is_the_same_in_any_step(
    heads, window, has_sinks, kv, device, generator, interpretable
) -> None:
    is_repeated = (window, has_sinks, kv) in [(0, False, "same"), (40, True, "fp8")]
    if IS_INTERPRETED and (heads[0] > 4 or (kv == "fp8" and not has_sinks) or is_repeated):
        pytest.skip("too long for the interpreter")
    num_heads, num_kv_heads, head_dim = heads
    num_blocks = -(-LENGTH // 16)
    cache = randn((num_blocks + 1, 2, 16, num_kv_heads, head_dim), device, generator)
    cache = cache.to(E4M3) if kv == "fp8" else cache
    table = torch.randperm(num_blocks, generator=generator).to(device, torch.int32) + 1
    q = randn((LENGTH, num_heads, head_dim), device, generator)
    sinks = randn((num_heads,), device, generator) if has_sinks else None

    def attend(q: Tensor, rows: AttentionRows) -> Tensor:
        scales = (0.5, 2.0) if kv == "fp8" else (1.0, 1.0)
        return paged_attention(q, cache, rows, head_dim**-0.5, window, sinks, *scales)

    assert_positions_have_one_result(attend, q, table)


@pytest.mark.parametrize("heads", [(4, 32, 16), (16, 64, 16), (128, 512, 64)], ids=str)
def test_latent_attention_of_a_position_is_the_same_in_any_step(
    heads, device, generator, interpretable
) -> None:
    if IS_INTERPRETED and heads[0] > 4:
        pytest.skip("too long for the interpreter")
    num_heads, latent, rope = heads
    num_blocks = -(-LENGTH // 16)
    cache = randn((num_blocks + 1, 16, latent + rope), device, generator)
    table = torch.randperm(num_blocks, generator=generator).to(device, torch.int32) + 1
    q = randn((LENGTH, num_heads, latent + rope), device, generator)

    def attend(q: Tensor, rows: AttentionRows) -> Tensor:
        return latent_attention(q[:, :, :latent], q[:, :, latent:], cache, rows, 0.1)

    assert_positions_have_one_result(attend, q, table)
