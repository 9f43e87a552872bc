# SPDX-License-Identifier: Apache-2.0
"""Rows of the weight table for the scales beside FP8 weights."""

from collections.abc import Iterator, Sequence

from pelton.models.weight_table import Weight
from pelton.quantization.fp8_scheme import FP8Scheme

_WEIGHT = ".weight"


def scale_rows(
    products: Sequence[Weight], scheme: FP8Scheme | None, num_layers: int
) -> Iterator[Weight]:
    """One row for each tensor of scales that a checkpoint of this scheme holds beside the weights
    in `products`, with the layer's number filled in: not every layer need be quantised."""
    if scheme is None:
        return
    for row in products:
        for layer in range(num_layers) if "{layer}" in row.source else (0,):
            module = row.source.removesuffix(_WEIGHT).format(layer=layer)
            if scheme.covers(module):
                target = row.target.format(layer=layer) + "_scale"
                yield Weight(f"{module}.{scheme.scale_name}", target, row.part)
