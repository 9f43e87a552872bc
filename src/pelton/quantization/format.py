# SPDX-License-Identifier: Apache-2.0
"""What a weight format is: a function from a loaded weight to something that multiplies by it."""

from typing import Protocol

from jaxtyping import Float
from torch import Tensor


class PackedWeight(Protocol):
    """A weight of shape [F, D], and its bias if it has one, in the form its device computes on."""

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """x W^T + b in x's number format, or in float32 where the format says so."""
        ...

    def dequantize(self) -> Float[Tensor, "F D"]:
        """The weight that `__call__` multiplies by, in float32: the reference of the format."""
        ...


class WeightFormat(Protocol):
    def __call__(
        self, weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None
    ) -> PackedWeight:
        """Packs `weight`; may keep a reference to it instead of a copy."""
        ...
