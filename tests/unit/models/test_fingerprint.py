# SPDX-License-Identifier: Apache-2.0
"""Weights that differ have different fingerprints, however they are laid out."""

import pytest
import torch
from torch import nn

from pelton.models.fingerprint import fingerprint


class Weights(nn.Module):
    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"w{number}", tensor)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_has_the_fingerprint_of_its_values(dtype: torch.dtype) -> None:
    values = torch.arange(3 * 50 * 70).reshape(3, 50, 70).remainder(97).to(dtype)
    transposed = values.transpose(1, 2).contiguous().transpose(1, 2)
    assert fingerprint(Weights(values)) == fingerprint(Weights(transposed))


def test_other_values_shapes_and_formats_have_others() -> None:
    values = torch.randn(40, 50)
    found = [values, values + 1, values.T, values.bfloat16(), values[:, :49], torch.tensor(3.0)]
    found.append(torch.zeros(0))
    assert len({fingerprint(Weights(tensor)) for tensor in found}) == len(found)
