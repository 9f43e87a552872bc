# SPDX-License-Identifier: Apache-2.0
"""The write to an FP8 cache and attention over one, against their references.

The interpreter reads the e4m3 NaN as 480 and cannot write one, so poison there is a number far
above all others; a card has the real one.
"""

import os

import pytest
import torch

from attention_cases import (
    ATTENTION_CASES,
    LARGE_ATTENTION_CASES,
    AttentionCase,
    make_attention_inputs,
    with_fp8_cache,
)
from pelton.kernels.paged_attention import unpack_fp8
from pelton.kernels.paged_attention.op import PAGED_ATTENTION
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rope_write_kv import ROPE_WRITE_KV, rope_write_kv_reference
from pelton.kernels.triton_runtime import runs_hopper
from tolerance import E4M3_STEP_ABS, E4M3_STEP_REL, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
FP8 = torch.float8_e4m3fn
SCALES = pytest.mark.parametrize("scales", [(1.0, 1.0), (0.037, 2.3)], ids=["unscaled", "scaled"])
SHAPES = [(0, 4, 2, 32), (1, 32, 8, 128), (7, 9, 3, 64), (65, 5, 2, 16), (3, 8, 1, 24)]


class Write:
    """Arguments of `rope_write_kv` on a middle layer of a poisoned pool."""

    def __init__(self, shape, dtype, device, generator) -> None:
        num_tokens, num_heads, num_kv_heads, head_dim = shape
        width = num_heads + 2 * num_kv_heads
        # Some magnitudes below e4m3's normal numbers, some above its largest.
        magnitudes = torch.logspace(-4, 3, num_tokens)[:, None, None]
        qkv = torch.randn(num_tokens, width, head_dim, generator=generator) * magnitudes
        splits = [num_heads, num_kv_heads, num_kv_heads]
        self.q, self.k, self.v = qkv.to(device, dtype).split(splits, dim=1)
        self.positions = torch.randint(0, 100, (num_tokens,), generator=generator).to(device)
        angles = torch.rand(100, head_dim // 2, generator=generator) * 6.28
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        pool = torch.full((8, 3, 2, 16, num_kv_heads, head_dim), float("nan")).to(device, FP8)
        self.cache_layer = pool[:, 1]
        self.slots = torch.randperm(7 * 16, generator=generator)[:num_tokens].to(device) + 16

    def run(self, function, scales) -> tuple[torch.Tensor, torch.Tensor]:
        cache_layer = self.cache_layer.clone()
        q = function(
            *(self.q, self.k, self.v, self.positions, self.cos_sin, cache_layer, self.slots),
            *(*scales, self.q.dtype),
        )
        return q, cache_layer


@DTYPES
@SCALES
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-H{s[1]}-G{s[2]}-K{s[3]}")
def test_rope_write_kv(shape, scales, dtype, device, generator, interpretable) -> None:
    """Values exactly; keys too, but for those that a card's fused multiply-add rounds otherwise."""
    case = Write(shape, dtype, device, generator)

    q, cache = case.run(ROPE_WRITE_KV.named("triton"), scales)

    expected_q, expected = case.run(rope_write_kv_reference, scales)
    assert_matches(q, expected_q.float(), dtype)
    is_nan = expected.isnan()
    assert torch.equal(cache.isnan(), is_nan)
    assert (~is_nan).sum() == case.k.numel() + case.v.numel()
    cache, expected = cache.float().nan_to_num(), expected.float().nan_to_num()
    assert torch.equal(cache[:, 1], expected[:, 1])
    if IS_INTERPRETED:
        assert torch.equal(cache[:, 0], expected[:, 0])
    torch.testing.assert_close(cache[:, 0], expected[:, 0], rtol=E4M3_STEP_REL, atol=E4M3_STEP_ABS)
    assert (cache != expected).sum() * 1000 <= cache.numel()


def test_what_is_too_large_saturates(device, generator, interpretable) -> None:
    case = Write((3, 4, 2, 32), torch.float32, device, generator)
    case.v = torch.full_like(case.v, 1e6)
    case.v[1], case.v[2, 0] = float("-inf"), 449.0
    if not IS_INTERPRETED:
        case.v[0, 1] = float("nan")

    _, cache = case.run(ROPE_WRITE_KV.named("triton"), (1.0, 0.5))

    written = cache[case.slots // 16, 1, case.slots % 16].float()
    assert (written[0, 0] == 448).all()
    assert (written[1] == -448).all()
    assert (written[2] == 448).all()
    if not IS_INTERPRETED:
        assert written[0, 1].isnan().all()


ATTENTIONS = pytest.mark.parametrize("name", ["triton", "invariant"])


def check_attention(case: AttentionCase, name, scales, dtype, device, generator) -> None:
    inputs = with_fp8_cache(make_attention_inputs(case, device, dtype, generator), *scales)

    actual = PAGED_ATTENTION.named(name)(*inputs.arguments(), *scales)

    expected = paged_attention_reference(*inputs.arguments(torch.float32), *scales)
    assert_matches(actual, expected, dtype)


@ATTENTIONS
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float32, (1.0, 1.0)), (HALF, (0.037, 2.3))],
    ids=["fp32-unscaled", "half-scaled"],
)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_paged_attention(case, name, scales, dtype, device, generator, interpretable) -> None:
    check_attention(case, name, scales, dtype, device, generator)


@ATTENTIONS
@SCALES
@pytest.mark.parametrize("case", LARGE_ATTENTION_CASES, ids=str)
def test_paged_attention_large(case, name, scales, device, generator) -> None:
    check_attention(case, name, scales, torch.bfloat16, device, generator)


UNPACKED = AttentionCase(
    rows=((1, 300), (1, 17), (3, 0), (700, 1021), (0, 0), (129, 2053), (2, 0)),
    num_decodes=2,
    num_heads=24,
    num_kv_heads=3,
    head_dim=64,
    has_sinks=True,
)


@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("heads", [slice(0, 5), slice(1, 3)], ids=["all", "some"])
def test_unpacking(heads, tile, device, generator, interpretable) -> None:
    case = AttentionCase(rows=((1, 40), (3, 0), (33, 131), (9, 32), (64, 64)), num_decodes=1,
                         num_heads=5, num_kv_heads=5, head_dim=64, block_size=16)  # fmt: skip
    inputs = with_fp8_cache(make_attention_inputs(case, device, HALF, generator), 1.0, 1.0)
    _, cache, rows, *_ = inputs.arguments()
    contexts = [context for _, context in rows.chunk_lens]

    unpacked, tables = unpack_fp8.unpack(cache[:, :, :, heads], rows, tile, HALF)

    counts = [-(-max(context, 1) // tile) for context in contexts]
    assert unpacked.shape == (sum(counts), 2, tile, len(range(5)[heads]), 64)
    for row, (context, num_tiles) in enumerate(zip(contexts, counts, strict=True), 1):
        first = sum(counts[: row - 1])
        assert tables[row, :num_tiles].tolist() == list(range(first, first + num_tiles))
        positions = torch.arange(context, device=device)
        blocks = rows.block_tables[row, positions // 16].long()
        expected = cache[blocks, :, positions % 16][:, :, heads].float()
        actual = unpacked[tables[row, :num_tiles].long()].transpose(1, 2).flatten(0, 1).float()
        assert torch.equal(actual[:context], expected)
        assert (actual[context:] == 0).all()


@pytest.mark.parametrize("room", [32_768, 2_400, 1_200], ids=["all", "two", "one"])
def test_prompts_are_unpacked_for_hopper(room, device, generator, monkeypatch) -> None:
    """Of all KV heads, of two of three, and of one after the other; on other cards, of none."""
    monkeypatch.setattr(unpack_fp8, "UNPACKED_TOKENS", room)
    monkeypatch.setattr(unpack_fp8, "_MIN_PRODUCTS", 1)
    monkeypatch.setattr(unpack_fp8, "num_multiprocessors", lambda _: 1)
    counts = []
    unpack = unpack_fp8.unpack
    monkeypatch.setattr(
        unpack_fp8, "unpack",
        lambda packed, *rest: counts.append(packed.shape[3]) or unpack(packed, *rest),
    )  # fmt: skip

    check_attention(UNPACKED, "triton", (0.037, 2.3), torch.bfloat16, device, generator)

    parts = {32_768: [3], 2_400: [2, 1], 1_200: [1, 1, 1]}[room]
    assert counts == (parts if runs_hopper(device) else [])


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_rows_with_drafts_see_what_their_tokens_would_alone(
    num_drafts, device, generator, interpretable
) -> None:
    """1 + k tokens of a row, as verified, beside k + 1 rows of one token over the same blocks."""
    new, contexts, scales = 1 + num_drafts, (40, 9, 77), (0.7, 1.3)
    case = AttentionCase(rows=tuple((new, c) for c in contexts), num_decodes=0, window=29,
                         has_sinks=True)  # fmt: skip
    inputs = with_fp8_cache(make_attention_inputs(case, device, torch.float32, generator), *scales)
    drafted = PAGED_ATTENTION.named("triton")(*inputs.arguments(), *scales)
    inputs.block_tables = inputs.block_tables.repeat_interleave(new, dim=0)
    lens = [c - num_drafts + i for c in contexts for i in range(new)]
    inputs.context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    inputs.query_starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device)
    inputs.num_decodes, inputs.max_query_len = len(lens), 1

    alone = PAGED_ATTENTION.named("triton")(*inputs.arguments(), *scales)

    assert_matches(drafted, alone, torch.float32)


@ATTENTIONS
def test_nan_in_a_seen_slot_reaches_the_output(name, device, generator) -> None:
    case = AttentionCase(rows=((1, 70), (1, 70), (9, 30)), num_decodes=2)
    inputs = with_fp8_cache(make_attention_inputs(case, device, HALF, generator), 1.0, 1.0)
    inputs.cache_layer[inputs.block_tables[0, 2].item(), 0, 5] = float("nan")

    actual = PAGED_ATTENTION.named(name)(*inputs.arguments())

    assert actual[0].isnan().all()
    assert actual[1:].isfinite().all()
