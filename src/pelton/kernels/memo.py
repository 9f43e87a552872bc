# SPDX-License-Identifier: Apache-2.0
"""Remembers what was last derived from small tensors, so that layers of one step share it.

Every layer of a step derives the same gather indices, masks and angles from the batch. On a CPU a
handful of tiny ops a layer costs as much as a fused product, while comparing the inputs with the
remembered ones costs a microsecond; and a comparison by value cannot be wrong.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Derived = TypeVar("Derived")


class Memo(Generic[Derived]):
    """Holds one entry. The derived value must not be changed by those who get it."""

    def __init__(self) -> None:
        self._entry: tuple[Hashable, tuple[Tensor, ...], Derived] | None = None

    def get(
        self, inputs: tuple[Tensor, ...], settings: Hashable, derive: Callable[[], Derived]
    ) -> Derived:
        """`derive()`, or what it returned for equal `inputs` and `settings` the last time.

        `settings` is all that `derive` depends on besides the values of `inputs`.
        """
        entry = self._entry
        if entry is not None and entry[0] == settings and all(map(torch.equal, entry[1], inputs)):
            return entry[2]
        derived = derive()
        self._entry = settings, tuple(tensor.clone() for tensor in inputs), derived
        return derived
