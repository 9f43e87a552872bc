# SPDX-License-Identifier: Apache-2.0
"""The table that says which checkpoint tensor fills which parameter.

Names use Hugging Face's spelling (GGUF names are translated while reading). `{layer}` stands for
every layer's number. A parameter that fuses several tensors along its first axis (query, key and
value; gate and up) names each with its `part`; the module that owns the parameter declares the
sizes of the parts as `parts: tuple[int, ...]`, or, where the parts' rows take turns, how many
there are as `interleaved_parts: Mapping[str, int]` by parameter name.

Experts are stacked along a parameter's first axis. A checkpoint that stacks them too needs nothing
special; one that has a tensor for each writes `{expert}` in the source, and then `part` is a part
of one expert.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weight:
    source: str
    """Checkpoint name, such as "model.layers.{layer}.self_attn.q_proj.weight"."""
    target: str
    """Parameter path in the model, such as "blocks.{layer}.attention.qkv.weight"."""
    part: int | None = None
    """Index into the owning module's `parts`; None: the whole parameter."""
    is_transposed: bool = False
    """The checkpoint's tensor has the parameter's last two axes the other way round."""
    layers: tuple[int, ...] | None = None
    """The layers that have this tensor; None: every one."""
