# SPDX-License-Identifier: Apache-2.0
"""A short digest that tells two sets of weights apart, from a few values of each tensor."""

from hashlib import blake2b

import torch
from torch import nn

_SAMPLES = 64


def fingerprint(model: nn.Module) -> str:
    """16 hex digits; the same for the same weights in one format, whatever device they are on."""
    digest = blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        values = tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(bytes(values.contiguous().view(torch.uint8).cpu().tolist()))
    return digest.hexdigest()
