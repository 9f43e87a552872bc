# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of `invariant_product` for many tokens in bfloat16 on Hopper.

    fetch (one warp)          copies chunks of 64 inputs to shared memory
    multiply (warpgroup 0)    first 64 features of the tile
    multiply (warpgroup 1)    last 64

An element is the same chain of products of 16 inputs as there, bit for bit. A program takes tile
after tile, and the copies of the next begin while this one is stored.
"""

from jaxtyping import Float
from torch import Tensor, bfloat16

from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    cdiv,
    gl,
    gluon,
    hopper,
    next_power_of_2,
    num_multiprocessors,
    runs_hopper,
)

_HALF_F = 64
_CHUNK = 64
_BYTES_AHEAD = 3 * 2**16


@gluon.jit
def locate_tile(index, num_token_tiles, num_feature_tiles):
    """As `invariant_product.locate_tile`: programs side by side share both operands."""
    per_group = 8 * num_feature_tiles
    first = index // per_group * 8
    height = gl.minimum(num_token_tiles - first, 8)
    place = index % per_group
    return first + place % height, place // height


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, COPIES: gl.constexpr, READERS: gl.constexpr):
    """Of each stage: it is ready when so many have said that they have copied, and free when so
    many warpgroups have said that they have read. A fence shows these and all in front of them."""
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=COPIES)
        hopper.mbarrier.init(free.index(i), count=READERS)
    hopper.fence_async_shared()
    return ready, free


@gluon.jit
def allocate_stages(x_desc, w_desc, STAGES: gl.constexpr):
    """Shared memory of both operands, the weight's in two halves, and their barriers."""
    x_shape: gl.constexpr = [STAGES] + x_desc.block_shape  # noqa: RUF005
    w_shape: gl.constexpr = [STAGES * 2] + w_desc.block_shape  # noqa: RUF005
    x_smem = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    ready, free = allocate_barriers(STAGES, 1, 2)
    return x_smem, w_smem, ready, free


@gluon.jit
def fetch_tiles(
    x_desc, w_desc, x_smem, w_smem, ready, free, num_token_tiles, num_feature_tiles, num_chunks,
    ELEMENT_BYTES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Both operands of all tiles of the program, chunk by chunk, as stages become free."""
    BLOCK_T: gl.constexpr = x_smem.shape[1]
    HALF_F: gl.constexpr = w_smem.shape[1]
    CHUNK: gl.constexpr = x_smem.shape[2]
    BYTES: gl.constexpr = (BLOCK_T + 2 * HALF_F) * CHUNK * ELEMENT_BYTES
    count = 0
    for index in range(gl.program_id(0), num_token_tiles * num_feature_tiles, gl.num_programs(0)):
        token_tile, feature_tile = locate_tile(index, num_token_tiles, num_feature_tiles)
        for chunk in range(num_chunks):
            stage = count % STAGES
            hopper.mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready.index(stage), BYTES)
            for half in gl.static_range(2):
                hopper.tma.async_copy_global_to_shared(
                    w_desc, [(feature_tile * 2 + half) * HALF_F, chunk * CHUNK],
                    ready.index(stage), w_smem.index(stage * 2 + half),
                )  # fmt: skip
            hopper.tma.async_copy_global_to_shared(
                x_desc, [token_tile * BLOCK_T, chunk * CHUNK], ready.index(stage),
                x_smem.index(stage),
            )  # fmt: skip
            count += 1


@gluon.jit
def start_product(x_tile, w_tile, partial, no):
    """In the registers of `partial`, whose sum is not needed any more. `no` is false, which the
    compiler must not know: it would take other registers, and has none left."""
    return hopper.warpgroup_mma(x_tile, w_tile.permute((1, 0)), partial, use_acc=no, is_async=True)


@gluon.jit
def _multiply(
    x_smem, w_smem, ready, free, bias_ptr, out_ptr, stride_ot, num_tokens, out_features,
    num_token_tiles, num_feature_tiles, num_chunks,
    HALF: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_T: gl.constexpr = x_smem.shape[1]
    HALF_F: gl.constexpr = w_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    count = 0
    for index in range(gl.program_id(0), num_token_tiles * num_feature_tiles, gl.num_programs(0)):
        token_tile, feature_tile = locate_tile(index, num_token_tiles, num_feature_tiles)
        acc = gl.zeros([HALF_F, BLOCK_T], gl.float32, layout)
        for chunk in range(num_chunks):
            stage = count % STAGES
            hopper.mbarrier.wait(ready.index(stage), count // STAGES & 1)
            acc = hopper.warpgroup_mma(
                w_smem.index(stage * 2 + HALF), x_smem.index(stage).permute((1, 0)), acc,
                is_async=True,
            )  # fmt: skip
            # The chunk in front of this one has been read.
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))

        first_feature = (feature_tile * 2 + HALF) * HALF_F
        features = first_feature + gl.arange(0, HALF_F, gl.SliceLayout(1, layout))
        tokens = token_tile * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, layout))
        is_feature = features < out_features
        if HAS_BIAS:
            bias = gl.load(bias_ptr + features, mask=is_feature, other=0.0)
            acc += bias.to(gl.float32)[:, None]
        # Eight threads store a run of eight features: of float32, all of a sector.
        out_ptrs = out_ptr + tokens.to(gl.int64)[None, :] * stride_ot + features[:, None]
        gl.store(
            out_ptrs, acc.to(out_ptr.dtype.element_ty),
            mask=is_feature[:, None] & (tokens < num_tokens)[None, :],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_token_tiles"])
def _hopper_product_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, stride_ot, num_tokens, out_features, num_token_tiles,
    num_feature_tiles, num_chunks, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, w_smem, ready, free = allocate_stages(x_desc, w_desc, STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, ready, free, bias_ptr, out_ptr, stride_ot, num_tokens,
                out_features, num_token_tiles, num_feature_tiles, num_chunks, 0, HAS_BIAS, STAGES,
            )),
            (_multiply, (
                x_smem, w_smem, ready, free, bias_ptr, out_ptr, stride_ot, num_tokens,
                out_features, num_token_tiles, num_feature_tiles, num_chunks, 1, HAS_BIAS, STAGES,
            )),
            (fetch_tiles, (
                x_desc, w_desc, x_smem, w_smem, ready, free, num_token_tiles, num_feature_tiles,
                num_chunks, 2, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def tune(num_tokens: int, out_features: int, num_programs: int) -> int:
    """Tokens of the tile with which `num_programs` multiprocessors are done first, the most of
    equals. A chunk takes the matrix units 4 cycles a token, and what it copies comes at 64 bytes a
    cycle. The same from one power of two to the next: the start runs a step of each."""
    num_tokens = next_power_of_2(num_tokens)
    num_feature_tiles = cdiv(out_features, 2 * _HALF_F)

    def count_cycles(block_t: int) -> int:
        num_turns = cdiv(cdiv(num_tokens, block_t) * num_feature_tiles, num_programs)
        return num_turns * max(4 * block_t, 2 * (block_t + 2 * _HALF_F))

    return min((256, 128, 64), key=count_cycles)


def runs_hopper_product(x: Float[Tensor, "T D"], weight: Float[Tensor, "F D"]) -> bool:
    """Whether the copy engine takes both."""
    return (
        runs_hopper(x.device)
        and x.dtype is bfloat16
        and all(
            side.stride(1) == 1
            and side.stride(0) >= side.shape[1] > 0
            and side.stride(0) % 8 == side.data_ptr() % 16 == 0
            for side in (x, weight)
        )
    )


def launch_hopper_product(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    out: Float[Tensor, "T F"],
) -> None:
    """As `invariant_product` for one product; `runs_hopper_product` must hold."""
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    block_t = tune(num_tokens, out_features, num_multiprocessors(x.device))
    num_token_tiles, num_feature_tiles = cdiv(num_tokens, block_t), cdiv(out_features, 2 * _HALF_F)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    num_programs = min(num_token_tiles * num_feature_tiles, num_multiprocessors(x.device))
    _hopper_product_kernel[(num_programs,)](
        x_desc=TensorDescriptor.from_tensor(x, [block_t, _CHUNK], layout),
        w_desc=TensorDescriptor.from_tensor(weight, [_HALF_F, _CHUNK], layout),
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        stride_ot=out.stride(0),
        num_tokens=num_tokens,
        out_features=out_features,
        num_token_tiles=num_token_tiles,
        num_feature_tiles=num_feature_tiles,
        num_chunks=cdiv(in_features, _CHUNK),
        HAS_BIAS=bias is not None,
        STAGES=_BYTES_AHEAD // (2 * _CHUNK * (block_t + 2 * _HALF_F)),
        num_warps=4,
    )
