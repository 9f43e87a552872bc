# SPDX-License-Identifier: Apache-2.0
"""A `Linear` whose weight is filled from an FP8 checkpoint, scales beside it."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.core.errors import CheckpointError
from pelton.layers.linear import Linear
from pelton.quantization.format import WeightFormat
from pelton.quantization.fp8 import (
    FP8Rows,
    FP8Weight,
    Rows,
    dequantize_fp8,
    pack_fp8,
    plain_rows,
)
from pelton.quantization.fp8_scheme import BLOCK_SIZE, FP8Scheme, Granularity


class FP8Linear(Linear):
    """`weight_scale` is [F, 1], [blocks of F, blocks of D], or one number for each part."""

    weight_scale: nn.Parameter
    fp8: FP8Scheme

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        scheme: FP8Scheme,
        *,
        has_bias: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.parts = tuple(parts)
        self.fp8 = scheme
        self.gives_float32 = False
        self._packed = None
        self._dtype = torch.get_default_dtype()
        num_rows = sum(self.parts)
        self.weight = _parameter((num_rows, in_features), torch.float8_e4m3fn)
        if scheme.granularity is Granularity.BLOCK:
            self.scale_parts = _block_counts(self.parts)
            shape: tuple[int, ...] = (sum(self.scale_parts), -(-in_features // BLOCK_SIZE))
        elif scheme.granularity is Granularity.CHANNEL:
            self.scale_parts = self.parts
            shape = (num_rows, 1)
        else:
            self.scale_parts = (1,) * len(self.parts)
            shape = (len(self.parts),)
        self.weight_scale = _parameter(shape, torch.float32)
        bias = _parameter((num_rows,), self._dtype) if has_bias else None
        self.register_parameter("bias", bias)

    @property
    def parts_of(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the parts of parameters that are not cut like the weight."""
        return {"weight_scale": self.scale_parts}

    def scales(self) -> Float[Tensor, "a b"]:
        """As the products take them: [F, 1] or blocks."""
        scales = self.weight_scale.detach()
        if self.fp8.granularity is not Granularity.TENSOR:
            return scales
        counts = torch.tensor(self.parts, device=scales.device)
        return scales.repeat_interleave(counts)[:, None].contiguous()

    def dequantize(self) -> Float[Tensor, "F D"]:
        """The weight in float32, before packing."""
        return dequantize_fp8(self.weight.detach(), self.scales())

    def pack(self, weight_format: WeightFormat) -> None:
        """`weight_format` takes the weight where the device does not compute in FP8."""
        self._packed = pack_fp8(
            self.weight.detach(),
            self.scales(),
            self.bias,
            has_blocks=self.fp8.granularity is Granularity.BLOCK,
            activation_bound=self.fp8.activation_bound,
            dtype=self._dtype,
            fallback=weight_format,
        )
        del self.weight, self.weight_scale

    def forward(self, x: Rows) -> Float[Tensor, "T F"]:
        packed = self._packed
        assert packed is not None, "an FP8 weight must be packed before it is used"
        if isinstance(x, FP8Rows) and isinstance(packed, FP8Weight):
            return packed.multiply(x)
        return packed(plain_rows(x))

    def gated(self, gate_up: Float[Tensor, "T 2D"]) -> Float[Tensor, "T F"]:
        if isinstance(self._packed, FP8Weight):
            return self._packed.gated(gate_up)
        return super().gated(gate_up)

    __call__ = forward


def make_linear(
    in_features: int,
    parts: Sequence[int],
    scheme: FP8Scheme | None,
    *,
    has_bias: bool = False,
    gives_float32: bool = False,
) -> Linear:
    """A product in the checkpoint's own format; `scheme` None: not quantised."""
    if scheme is None:
        return Linear(in_features, parts, has_bias=has_bias, gives_float32=gives_float32)
    return FP8Linear(in_features, parts, scheme, has_bias=has_bias)


def _block_counts(parts: Sequence[int]) -> tuple[int, ...]:
    """Blocks of rows a part. Only the last part may end within a block: the others' blocks would
    not line up with those of the fused weight."""
    for size in parts[:-1]:
        if size % BLOCK_SIZE:
            raise CheckpointError(
                f"FP8 weights in blocks of {BLOCK_SIZE} rows need sizes that are multiples of"
                f" {BLOCK_SIZE}, and this model fuses one of {size} rows; use the unquantised"
                " checkpoint."
            )
    return tuple(-(-size // BLOCK_SIZE) for size in parts)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
