# SPDX-License-Identifier: Apache-2.0
"""Fills a model's parameters from a checkpoint by its weight table, completely or not at all.

Names and shapes are compared first, from metadata alone; only a checkpoint that fits is read. One
tensor at a time is held besides the parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import Checkpoint
from pelton.models.kv_scales import KV_SCALES
from pelton.models.weight_table import Weight

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST_MISSING = 100_000
MAX_NAMES = 5
"""Names listed in an error; the rest are counted."""
NOT_WEIGHTS = (
    ".rotary_emb.inv_freq",
    *KV_SCALES,
    ".input_scale",
    ".input_scale_ub",
)
"""Endings of tensors that some checkpoints hold and that fill no parameter: what is computed
instead, the scales of an FP8 cache, which are read where there is one, and those of activations,
which get theirs as they come."""
_SCALES = ("_scale", "_scale_inv", "_scales")
"""Endings of tensors that weights are multiplied by."""
_HIGHEST_SCALE = 1e30
_HIGHEST_E8M0 = 252
"""2^125: the highest E2M1 number, 6, times it is finite. 255 stands for NaN."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Fill:
    """One tensor of a checkpoint and where it goes."""

    source: str
    destination: "Tensor"
    """The parameter, or the part of it that this tensor fills."""


def load_weights(model: "nn.Module", table: Sequence[Weight], checkpoint: Checkpoint) -> None:
    """Fills the parameters in place, converting to their dtype and device.

    With `tie_word_embeddings` the checkpoint may hold the head as well, if it equals the embedding.
    Raises `CheckpointError` for tensors that are missing, surplus or of the wrong shape, and for
    scales that no weight can have.
    """
    with torch.no_grad():
        for fill in match_tensors(model, table, checkpoint):
            fill.destination.copy_(_of_its_kind(checkpoint.read(fill.source), fill))
    is_tied = bool(checkpoint.config.get("tie_word_embeddings"))
    if not is_tied or HEAD not in checkpoint.tensor_names:
        return
    if not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        raise CheckpointError(
            f"{HEAD} in {checkpoint.path} differs from {EMBEDDING}, to which "
            "tie_word_embeddings ties it."
        )


def match_tensors(
    model: "nn.Module", table: Sequence[Weight], checkpoint: Checkpoint
) -> list[Fill]:
    """What `load_weights` would read into what, from names and shapes alone; raises what it
    raises for them. The model may be on `meta`: so a checkpoint that does not fit is refused
    before anything is allocated."""
    is_tied = bool(checkpoint.config.get("tie_word_embeddings"))
    # A config may promise millions of tensors more than there are; not all need be counted.
    planned = islice(plan_fills(model, table), len(checkpoint.tensor_names) + _MOST_MISSING)
    fills = [fill for fill in planned if not (is_tied and fill.source == HEAD)]
    wanted = {fill.source for fill in fills}
    unused: tuple[str, ...] = getattr(model, "unused_tensors", ())
    names = {
        name
        for name in checkpoint.tensor_names
        if not name.endswith(NOT_WEIGHTS) and not name.startswith(unused)
    }
    if is_tied:
        names.discard(HEAD)
    _refuse(
        [fill.source for fill in fills if fill.source not in names],
        f"{checkpoint.path} lacks {{count}} tensors of this architecture: {{names}}; download it"
        " again, or the config.json that belongs to it.",
    )
    _refuse(
        [name for name in checkpoint.tensor_names if name in names - wanted],
        f"{checkpoint.path} holds {{count}} tensors this architecture has not: {{names}}; use the"
        " config.json that belongs to them.",
    )
    _refuse(
        [
            f"{fill.source} is {list(shape)} instead of {list(fill.destination.shape)}"
            for fill in fills
            # One number is written with an axis or without.
            if (shape := checkpoint.shape(fill.source) or (1,)) != fill.destination.shape
        ],
        f"{checkpoint.path} holds {{count}} tensors of the wrong shape: {{names}}; use the"
        " config.json that belongs to them.",
    )
    return fills


def plan_fills(model: "nn.Module", table: Sequence[Weight]) -> Iterator[Fill]:
    """Every checkpoint tensor the model wants, in table order."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    num_layers = _count_layers(table, parameters)
    filled: set[int] = set()
    for row in table:
        layers = range(num_layers) if row.layers is None else row.layers
        for layer in layers if "{layer}" in row.source else (0,):
            target = row.target.format(layer=layer)
            assert target in parameters, f"the weight table names no parameter: {target}"
            parameter = parameters[target]
            filled.add(id(parameter))
            if "{expert}" not in row.source:
                source = row.source.format(layer=layer)
                yield Fill(source, _part(model, target, parameter, row))
                continue
            for expert, own in enumerate(parameter):
                source = row.source.format(layer=layer, expert=expert)
                yield Fill(source, _part(model, target, own, row))
    unfilled = [name for name, parameter in parameters.items() if id(parameter) not in filled]
    assert not unfilled, f"the weight table leaves out parameters: {unfilled}"


def _count_layers(table: Sequence[Weight], parameters: Mapping[str, "Tensor"]) -> int:
    prefixes = {row.target.partition("{layer}")[0] for row in table if "{layer}" in row.target}
    layers = {
        int(name.removeprefix(prefix).partition(".")[0])
        for prefix in prefixes
        for name in parameters
        if name.startswith(prefix)
    }
    assert layers == set(range(len(layers))), f"layers are not numbered from 0: {sorted(layers)}"
    return len(layers)


def _part(model: "nn.Module", target: str, parameter: "Tensor", row: Weight) -> "Tensor":
    if row.is_transposed:
        parameter = parameter.transpose(-1, -2)
    if row.part is None:
        return parameter
    owner_name, _, name = target.rpartition(".")
    owner = model.get_submodule(owner_name)
    interleaved = getattr(owner, "interleaved_parts", {})
    if name in interleaved:
        # Of one expert, or of all of them, stacked.
        rows = slice(row.part, None, interleaved[name])
        return parameter[rows] if "{expert}" in row.source else parameter[:, rows]
    parts = getattr(owner, "parts_of", {}).get(name, owner.parts)
    assert isinstance(parts, tuple), (target, parts)
    assert sum(parts) == parameter.shape[0], (target, parts, parameter.shape)
    return parameter.narrow(0, sum(parts[: row.part]), parts[row.part])


def _of_its_kind(tensor: "Tensor", fill: Fill) -> "Tensor":
    """Floating-point formats of 16 bits and more convert to each other. Others are packed or carry
    their scale elsewhere: converting them would load nonsense without a word."""
    wanted = fill.destination.dtype
    if fill.source.endswith(_SCALES):
        if tensor.dtype is torch.float8_e8m0fnu:  # a byte, and a number that float32 holds
            tensor = tensor.view(torch.uint8) if wanted is torch.uint8 else tensor.float()
        _check_scales(tensor, fill.source)
    if tensor.dtype != wanted and not (_is_wide(tensor.dtype) and _is_wide(wanted)):
        raise CheckpointError(
            f"{fill.source} holds {tensor.dtype} values and this model stores {wanted} there:"
            " its config and its tensors name different weight formats."
        )
    return tensor


def _check_scales(scales: "Tensor", name: str) -> None:
    low, high = (float(value) for value in torch.aminmax(scales))  # NaN where one is
    is_right = high <= _HIGHEST_E8M0 if scales.dtype is torch.uint8 else 0 < low <= high
    if not is_right or not high <= _HIGHEST_SCALE:
        wanted = f"at most {_HIGHEST_E8M0}" if scales.dtype is torch.uint8 else "positive, finite"
        raise CheckpointError(
            f"{name} holds scales from {low:g} to {high:g}, and those of weights are {wanted}: the"
            " checkpoint is damaged; download it again."
        )


def _is_wide(dtype: "torch.dtype") -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _refuse(names: Sequence[str], message: str) -> None:
    if not names:
        return
    listed = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        listed += f" and {len(names) - MAX_NAMES} more"
    raise CheckpointError(message.format(count=len(names), names=listed))
