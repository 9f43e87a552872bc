# SPDX-License-Identifier: Apache-2.0
"""The table that says which checkpoint tensor fills which parameter.

Names use Hugging Face's spelling (GGUF names are translated while reading). `{layer}` stands for
every layer's number. A parameter that fuses several tensors along its first axis (query, key and
value; gate and up) names each with its `part`; the module that owns the parameter declares the
sizes of the parts as `parts: tuple[int, ...]`.
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
