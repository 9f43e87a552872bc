# SPDX-License-Identifier: Apache-2.0
"""Compiles Gluon kernels for Hopper where there is no GPU, as their launchers launch them.

For a process of its own, in which PyTorch says that there is a GPU before anything of Pelton is
imported: kernels are then Triton's own, and a launch compiles instead. Prints what the assembler
says of each. The emulator runs the same source but is Python: it takes what the compiler refuses.
"""

import os
import re
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import jit

from attention_cases import AttentionCase, make_attention_inputs, with_fp8_cache
from latent_cases import make_latent_inputs
from moe_cases import ExpertCase, make_expert_ids
from pelton.kernels import hopper_product, hopper_vector, triton_runtime
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.fp8 import hopper_blocks, hopper_linear
from pelton.kernels.fp8.scales import FP8Operands
from pelton.kernels.mla import hopper as mla_hopper
from pelton.kernels.moe import fp8_tall
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product import hopper_one
from pelton.kernels.moe.mxfp4_product.hopper import (
    mxfp4_down_product_hopper,
    mxfp4_gate_up_product_hopper,
)
from pelton.kernels.moe.mxfp4_product.hopper_one import LoneToken
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.routing import SoftmaxTopK
from pelton.kernels.moe.sort_by_expert import RoutedRows, sort_by_expert_reference
from pelton.kernels.paged_attention import hopper_prefill, triton_invariant

CPU, HALF, E4M3 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
TARGET = GPUTarget("cuda", 90, 32)
GATE = Gate(alpha=1.702, limit=7.0, offset=1.0)


def compile_instead(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of `JITFunction.run`: of Gluon kernels; others beside them are passed over."""
    if not kernel.is_gluon():
        return
    backend = make_backend(TARGET)
    options |= {"debug": False, "instrumentation_mode": ""}
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, others = binder(*arguments, **options)
    settings, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, others
    )
    source = GluonASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGET, options=settings.__dict__)
    # Where four e4m3 numbers are stored as one word, ptxas 12.8 may lose the first two of them for
    # what else reads them, which then reads the stack pointer.
    faults = re.findall(r"UNPACK_B R\d+, R1\b.*", compiled.asm["sass"])
    assert not faults, f"{kernel.__name__} converts the stack pointer: {faults}"


def compile_prefill() -> None:
    for head_dim, is_unpacked in ((128, False), (64, True)):
        case = AttentionCase(((1, 9), (40, 170)), 1, 8, 1, head_dim, 16, 0, is_unpacked)
        q, cache, rows, scale, _, sinks = make_attention_inputs(
            case, CPU, HALF, torch.Generator()
        ).arguments()
        hopper_prefill.hopper_prefill_attention(
            q, cache, rows, scale, sinks, 1.0, torch.empty_like(q), ends_in_zeros=is_unpacked
        )


def compile_fp8_attention() -> None:
    # Decodes, whose queries are 8 columns, split and not; prompts, with 16.
    for num_rows, new, head_dim in ((1, 1, 64), (80, 1, 128), (1, 40, 64), (80, 40, 128)):
        case = AttentionCase(((new, 300),) * num_rows, num_rows if new == 1 else 0, 32, 4, head_dim)
        inputs = with_fp8_cache(make_attention_inputs(case, CPU, HALF, torch.Generator()), 1.0, 1.0)
        q, cache, rows, scale, window, sinks = inputs.arguments()[:6]
        part, tokens = slice(0, num_rows), slice(0, num_rows * new)
        triton_invariant.invariant_attention(
            q, cache, rows, part, tokens, new, scale, window, sinks, 1.0, torch.empty_like(q)
        )


def compile_latent_attention() -> None:
    inputs = make_latent_inputs((((1, 300),), 1, 64, 512, 64, 64), CPU, HALF, torch.Generator())
    q_latent, q_rope, cache, rows, scale = inputs
    for may_split in (False, True):
        mla_hopper.hopper_latent_rows(
            q_latent, q_rope, cache, rows, slice(0, 1), slice(0, 1), 1, scale,
            torch.empty_like(q_latent), may_split=may_split,
        )  # fmt: skip


def compile_mxfp4_products() -> None:
    size, num_experts = 256, 2
    # One token then takes programs of one warpgroup for the first product, of two for the second.
    hopper_one.num_multiprocessors = lambda device: 6
    one_token = LoneToken.of(SoftmaxTopK(torch.zeros(1, num_experts, dtype=HALF), 2))
    blocks = torch.zeros(num_experts, 2 * size, size // 32, 16, dtype=torch.uint8)
    scales = torch.full(blocks.shape[:3], 120, dtype=torch.uint8)
    gate_up = tile_weights(blocks, scales)
    down = tile_weights(blocks[:, :size].contiguous(), scales[:, :size].contiguous())
    bias = torch.zeros(num_experts, 2 * size, dtype=HALF)
    few, many = route(20, num_experts, 16), route(600, num_experts, 128)
    for routed, is_invariant in (
        (one_token, False), (few, False), (many, False), (route(600, num_experts, 64), True)
    ):  # fmt: skip
        x = torch.zeros(routed.num_rows // routed.top_k, size, dtype=HALF)
        with batch_invariant(wanted=is_invariant):
            hidden = mxfp4_gate_up_product_hopper(x, routed, *gate_up, bias, GATE)
            mxfp4_down_product_hopper(hidden, routed, *down, bias[:, :size].contiguous())
    # Rows as long as GPT-OSS's, as high as a tile can be.
    long_blocks = torch.zeros(num_experts, 2 * size, 90, 16, dtype=torch.uint8)
    weights = tile_weights(long_blocks, torch.full(long_blocks.shape[:3], 120, dtype=torch.uint8))
    routed = route(20, num_experts, 32)
    mxfp4_gate_up_product_hopper(torch.zeros(20, 2880, dtype=HALF), routed, *weights, bias, GATE)
    mxfp4_down_product_hopper(torch.zeros(40, 2880, dtype=HALF), routed, *weights, bias)
    x = torch.zeros(1, 2880, dtype=HALF)
    for is_invariant in (False, True):
        with batch_invariant(wanted=is_invariant):
            mxfp4_gate_up_product_hopper(x, one_token, *weights, bias, GATE)
            mxfp4_down_product_hopper(x.expand(2, -1), one_token, *weights, bias)


def compile_fp8_experts() -> None:
    num_tokens, size, num_experts = 600, 256, 4
    routed = route(num_tokens, num_experts, 128)
    weight = torch.zeros(num_experts, size, size, dtype=E4M3)
    scales = torch.ones(num_experts, size // 128, size // 128)
    for gate, num_rows in ((GATE, num_tokens), (None, routed.num_rows)):
        x, x_scales = torch.zeros(num_rows, size, dtype=E4M3), torch.ones(num_rows, size // 128)
        out = torch.empty(routed.num_rows, size // 2 if gate else size, dtype=HALF)
        fp8_tall.launch_tall_product(x, x_scales, routed, weight, scales, gate, out)


def compile_fp8_linear() -> None:
    x, weight = torch.zeros(300, 256, dtype=E4M3), torch.zeros(512, 256, dtype=E4M3)
    scales = torch.ones(300, 1), torch.ones(512, 1)
    for dtype, bias in ((torch.float32, None), (HALF, torch.zeros(512, dtype=HALF))):
        operands = FP8Operands(x, scales[0], weight, scales[1], bias, dtype)
        hopper_linear.launch_hopper_linear(operands, torch.empty(300, 512, dtype=dtype))


def compile_fp8_blocks() -> None:
    x, weight = torch.zeros(300, 256, dtype=E4M3), torch.zeros(512, 256, dtype=E4M3)
    scales = torch.ones(2, 300).t(), torch.ones(4, 2)
    bias = torch.zeros(512)
    cases = ((64, None, HALF), (128, None, HALF), (256, None, HALF), (256, bias, torch.float32))
    for block_f, bias, dtype in cases:
        hopper_blocks.tune = lambda *sizes, block_f=block_f: block_f
        operands = FP8Operands(x, scales[0], weight, scales[1], bias, dtype)
        hopper_blocks.launch_hopper_blocks(operands, torch.empty(300, 512, dtype=dtype))


def compile_product() -> None:
    weight = torch.zeros(20_000, 128, dtype=HALF)
    x = torch.zeros(70, 128, dtype=HALF)
    for block_t in (64, 128, 256):
        hopper_product.tune = lambda *sizes, block_t=block_t: block_t
        hopper_product.launch_hopper_product(x, weight, None, torch.empty(70, 20_000))


def compile_vector() -> None:
    for out_features, in_features in ((5120, 2880), (2880, 4096), (576, 576)):
        x = torch.zeros(1, in_features, dtype=HALF)
        weight = torch.zeros(out_features, in_features, dtype=HALF)
        bias = torch.zeros(out_features, dtype=HALF)
        with hopper_vector.tune_hopper_vector.trying({}):
            hopper_vector.launch_hopper_vector(x, weight, bias, torch.empty(1, out_features))


def route(num_tokens: int, num_experts: int, tile_rows: int) -> RoutedRows:
    case = ExpertCase(num_tokens, num_experts, 2, 128, 128)
    return sort_by_expert_reference(
        make_expert_ids(case, torch.Generator()), num_experts, tile_rows
    )


CASES: dict[str, Callable[[], None]] = {
    "prefill": compile_prefill,
    "fp8-attention": compile_fp8_attention,
    "latent-attention": compile_latent_attention,
    "mxfp4-products": compile_mxfp4_products,
    "fp8-experts": compile_fp8_experts,
    "fp8-linear": compile_fp8_linear,
    "fp8-blocks": compile_fp8_blocks,
    "product": compile_product,
    "vector": compile_vector,
}


def compile_case(name: str) -> None:
    triton_runtime.runs_hopper = lambda device: True
    triton_runtime.overlap_options = lambda device, num_tokens: (
        {"OVERLAPS": True, "launch_pdl": True} if num_tokens == 1 else {"OVERLAPS": False}
    )
    for module in list(sys.modules.values()):
        for question in ("runs_hopper", "overlap_options"):
            if hasattr(module, question):
                setattr(module, question, getattr(triton_runtime, question))
    jit.JITFunction.run = compile_instead
    triton.knobs.nvidia.dump_ptxas_log = True
    with TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        CASES[name]()
