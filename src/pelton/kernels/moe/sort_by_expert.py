# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sorts routed rows by expert and cuts each expert's run in tiles of equal height.

Row n = t * k + j is token t on its way to its choice j. The grouped products then walk a table of
tiles, whose length depends on the number of rows and never on where they go: a grid of fixed shape
that a CUDA graph can replay, with nothing for the host to wait for. Entries past the last tile are
empty: programs on them return at once, or are never given one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.triton_runtime import (
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


@dataclass(frozen=True, slots=True)
class RoutedRows:
    expert_ids: Int[Tensor, "T k"]
    """Contiguous."""
    order: Int[Tensor, " N"]
    """Row numbers sorted by expert; an expert's rows keep their order."""
    tiles: Int[Tensor, "tiles 3"]
    """(expert, first, end): places [first, end) of `order` belong to that expert, at most
    `tile_rows` of them. An unused entry is three zeros."""
    tile_rows: int

    @property
    def num_rows(self) -> int:
        return self.expert_ids.numel()

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `num_rows` rows make, however they are spread over the experts."""
    num_ragged = min(num_rows, num_experts)
    return (num_rows + num_ragged * (tile_rows - 1)) // tile_rows


def sort_by_expert_reference(
    expert_ids: Int[Tensor, "T k"], num_experts: int, tile_rows: int
) -> RoutedRows:
    num_rows = expert_ids.numel()
    flat = expert_ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, tile_rows):
            tiles.append((expert, first, min(first + tile_rows, start + count)))
        start += count
    tiles += [(0, 0, 0)] * (max_tiles(num_rows, num_experts, tile_rows) - len(tiles))
    table = torch.tensor(tiles, dtype=torch.int32, device=expert_ids.device).view(-1, 3)
    return RoutedRows(expert_ids, order.to(torch.int32), table, tile_rows)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tile_rows"])
def _sort_by_expert_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_rows,
    num_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program an expert: counts all rows, then writes its own. No atomics, so the order is
    the same every time."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_rows, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=NUM_EXPERTS)
        counts += tl.histogram(ids, BLOCK_E)
    counts = tl.where(experts < NUM_EXPERTS, counts, 0)
    tile_counts = tl.cdiv(counts, tile_rows)
    is_before = experts < expert
    first = tl.sum(tl.where(is_before, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(is_before, tile_counts, 0), axis=0)
    count = tl.sum(tl.where(experts == expert, counts, 0), axis=0)

    for tile in range(0, tl.cdiv(count, tile_rows)):
        entry_ptr = tiles_ptr + (first_tile + tile) * 3
        tl.store(entry_ptr, expert)
        tl.store(entry_ptr + 1, first + tile * tile_rows)
        tl.store(entry_ptr + 2, first + tl.minimum((tile + 1) * tile_rows, count))
    # The programs share the unused entries among them.
    used = tl.sum(tile_counts, axis=0)
    for tile in range(used + expert, num_tiles, NUM_EXPERTS):
        entry_ptr = tiles_ptr + tile * 3
        tl.store(entry_ptr, 0)
        tl.store(entry_ptr + 1, 0)
        tl.store(entry_ptr + 2, 0)

    place = first
    for start in range(0, num_rows, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=NUM_EXPERTS)
        is_mine = ids == expert
        ranks = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + place + ranks, rows, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), axis=0)


def tune(num_rows: int) -> dict[str, int]:
    block = min(max(next_power_of_2(num_rows), 32), 4096)
    return {"BLOCK_N": block, "num_warps": min(max(block // 256, 1), 8)}


def _sort_by_expert_triton(
    expert_ids: Int[Tensor, "T k"], num_experts: int, tile_rows: int
) -> RoutedRows:
    num_rows, device = expert_ids.numel(), expert_ids.device
    num_tiles = max_tiles(num_rows, num_experts, tile_rows)
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    if num_rows:
        _sort_by_expert_kernel[(num_experts,)](
            ids_ptr=expert_ids,
            order_ptr=order,
            tiles_ptr=tiles,
            num_rows=num_rows,
            num_tiles=num_tiles,
            tile_rows=tile_rows,
            NUM_EXPERTS=num_experts,
            # One more bin than experts, for what is past the last row.
            BLOCK_E=next_power_of_2(num_experts + 1),
            **tune(num_rows),
            **overlap_options(device, expert_ids.shape[0]),
        )
    return RoutedRows(expert_ids, order, tiles, tile_rows)


def sort_by_expert_cost(num_rows: int, num_tiles: int) -> OpCost:
    """No floating-point work: ids in, order and tiles out."""
    return OpCost(0, 4 * (2 * num_rows + 3 * num_tiles))


def _sort_by_expert_meta(
    expert_ids: Int[Tensor, "T k"], num_experts: int, tile_rows: int
) -> RoutedRows:
    num_rows = expert_ids.numel()
    num_tiles = max_tiles(num_rows, num_experts, tile_rows)
    log_cost("sort_by_expert", sort_by_expert_cost(num_rows, num_tiles))
    order = expert_ids.new_empty(num_rows)
    return RoutedRows(expert_ids, order, expert_ids.new_empty((num_tiles, 3)), tile_rows)


SORT_BY_EXPERT: Dispatch[Callable[[Tensor, int, int], RoutedRows]] = Dispatch(
    "sort_by_expert",
    Implementation("meta", on_meta, _sort_by_expert_meta),
    Implementation(
        "triton", lambda device, dtype: runs_triton(device, torch.float32), _sort_by_expert_triton
    ),
    Implementation("reference", anywhere, sort_by_expert_reference),
)


TALLEST_TILE = 128


def choose_tile_rows(
    num_rows: int, num_experts: int, device: torch.device, tallest: int = TALLEST_TILE
) -> int:
    """Twice an expert's share of the rows, in the heights that the products have tiles for, so
    that most experts read their weights once. A CPU takes all of an expert's rows at once."""
    if device.type == "cpu" and not runs_triton(device, torch.float32):
        return max(num_rows, 1)
    share = next_power_of_2(2 * num_rows // num_experts)
    return min(max(share, 16), tallest)


def sort_by_expert(
    expert_ids: Int[Tensor, "T k"], num_experts: int, tallest: int = TALLEST_TILE
) -> RoutedRows:
    """`expert_ids` (int32, contiguous) lie in [0, num_experts). Tiles have at most `tallest` rows.
    The result is new memory."""
    assert expert_ids.is_contiguous(), expert_ids.stride()
    tile_rows = choose_tile_rows(expert_ids.numel(), num_experts, expert_ids.device, tallest)
    run = SORT_BY_EXPERT.select(expert_ids.device, expert_ids.dtype)
    return run(expert_ids, num_experts, tile_rows)
