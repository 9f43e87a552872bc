# SPDX-License-Identifier: Apache-2.0
"""What an 8-bit product needs before and after it: rows to integers, and sums back to numbers.

q = floor(limit x / max |x| + 1/2), row by row, with scale = max |x| / limit: symmetric.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.perf.cost import OpCost, log_cost

_SMALLEST = 1e-38
"""Stands for the largest magnitude of a row of zeros."""


def quantize_rows_reference(
    x: Float[Tensor, "n D"], limit: int = 127
) -> tuple[Int8[Tensor, "n D"], Float[Tensor, " n"]]:
    highest = x.float().abs().amax(dim=1).clamp(min=_SMALLEST)
    integers = torch.floor(x.float() * (limit / highest)[:, None] + 0.5).clamp(-limit, limit)
    scales = torch.where(highest.isfinite(), highest / limit, torch.nan)
    return integers.nan_to_num().to(torch.int8), scales


def _quantize_rows_meta(
    x: Float[Tensor, "n D"], limit: int
) -> tuple[Int8[Tensor, "n D"], Float[Tensor, " n"]]:
    num_rows = x.shape[0]
    num_bytes = x.numel() * (x.element_size() + 1) + 4 * num_rows
    log_cost("quantize_rows", OpCost(4 * x.numel(), num_bytes))
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(num_rows, dtype=torch.float32)


def scale_rows_reference(
    product: Float[Tensor, "n F"],
    scales: Float[Tensor, " n"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "n F"]:
    scaled = product * scales[:, None]
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


def _scale_rows_meta(
    product: Float[Tensor, "n F"],
    scales: Float[Tensor, " n"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "n F"]:
    elements = product.numel()
    log_cost("scale_rows", OpCost(2 * elements, elements * (4 + dtype.itemsize)))
    return product.new_empty(product.shape, dtype=dtype)


QUANTIZE_ROWS: Dispatch[Callable[[Tensor, int], tuple[Tensor, Tensor]]] = Dispatch(
    "quantize_rows",
    Implementation("meta", on_meta, _quantize_rows_meta),
    Implementation("native", runs_native, "pelton.kernels.native.int8_rows:quantize_rows"),
    Implementation("reference", anywhere, quantize_rows_reference),
)
SCALE_ROWS: Dispatch[Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]] = Dispatch(
    "scale_rows",
    Implementation("meta", on_meta, _scale_rows_meta),
    Implementation("native", runs_native, "pelton.kernels.native.int8_rows:scale_rows"),
    Implementation("reference", anywhere, scale_rows_reference),
)


def quantize_rows(
    x: Float[Tensor, "n D"], limit: int = 127
) -> tuple[Int8[Tensor, "n D"], Float[Tensor, " n"]]:
    """Integers in [-limit, limit] and the float32 scale of each row: NaN where a value is not
    finite, so that what is computed from the row is not finite either. x may be strided over n."""
    assert x.stride(1) == 1, x.stride()
    return QUANTIZE_ROWS.select(x.device, x.dtype)(x, limit)


def scale_rows(
    product: Float[Tensor, "n F"],
    scales: Float[Tensor, " n"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "n F"]:
    """product * scales + bias in `dtype`, which `bias` has too. `product` is contiguous float32."""
    assert product.is_contiguous(), product.stride()
    assert bias is None or bias.dtype is dtype, bias
    return SCALE_ROWS.select(product.device, dtype)(product, scales, bias, dtype)
