# SPDX-License-Identifier: Apache-2.0
"""What the engine must know of a model to plan for it: sizes only, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with one retention rule. They share a block table; a block holds all of them.

    `window` is the number of most recent tokens (the current one included) a layer attends to;
    0 means all of them. Blocks wholly behind the window are freed.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0
    is_latent: bool = False
    """A token has one entry a layer, its latent: key and value in one (multi-head latent
    attention). `num_kv_heads` is then 1 and `head_dim` the size of the entry."""

    @property
    def num_planes(self) -> int:
        """Vectors a KV head keeps of a token: a key and a value, or one latent."""
        return 1 if self.is_latent else 2

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Bytes of one block: what `block_size` tokens keep over the group's layers."""
        per_token = len(self.layers) * self.num_planes * self.num_kv_heads * self.head_dim
        return per_token * block_size * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    name: str
    """Architecture and size, such as "llama-135M"."""
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_context: int
    """Positions the model was made for."""
    num_parameters: int
    kv_groups: tuple[KVGroup, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int = 0
    """Multi-token prediction layers that the checkpoint has; 0: none to draft with."""
