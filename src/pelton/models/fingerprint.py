# SPDX-License-Identifier: Apache-2.0
"""A short digest that tells two sets of weights apart, from a few values of each tensor."""

from hashlib import blake2b

import torch
from torch import Tensor, nn

_SAMPLES = 64


def fingerprint(model: nn.Module) -> str:
    """16 hex digits; the same for the same weights in one format, whatever device they are on."""
    digest = blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor) and tensor.numel():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(bytes(_sample(tensor).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Values from all over the tensor, which may be a view of any strides; copies nothing else."""
    if not tensor.dim():
        tensor = tensor.reshape(1)
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # not every format can be indexed
    step = max(1, tensor.numel() // _SAMPLES)
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)].cpu()
