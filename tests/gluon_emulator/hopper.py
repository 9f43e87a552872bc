# SPDX-License-Identifier: Apache-2.0
"""In place of `triton.experimental.gluon.language.nvidia.hopper`: what the kernels use of it."""

from typing import Any

from gluon_emulator.barriers import Barrier
from gluon_emulator.language import MBarrierLayout as _MBarrierLayout
from gluon_emulator.memory import Pointer, SharedMemory, TensorDescriptor
from gluon_emulator.schedule import Work, current
from gluon_emulator.values import Tile


class mbarrier:
    """Arrivals and bytes; `pred` says whether anything is done at all."""

    MBarrierLayout = _MBarrierLayout

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.initialise(count)

    @staticmethod
    def expect(barrier: Barrier, bytes: int, pred: Any = True) -> None:
        """Arrives, too."""
        current().pause()
        if pred:
            barrier.arrive(num_bytes=bytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        current().pause()
        if pred:
            barrier.arrive(count)

    @staticmethod
    def wait(barrier: Barrier, phase: Any) -> None:
        barrier.wait(phase.__index__())


class tma:
    @staticmethod
    def async_copy_global_to_shared(
        descriptor: TensorDescriptor,
        coordinates: list[Any],
        barrier: Barrier,
        result: SharedMemory,
        pred: Any = True,
    ) -> None:
        """Boxes land one by one, in any order."""
        if not pred:
            return
        corner = [coordinate.__index__() for coordinate in coordinates]

        def land() -> None:
            box = descriptor.read_box(corner)
            result.write(box)
            barrier.land(box.numel() * box.element_size())

        result.poison()
        Work(f"copy to {result.name}", land)


class async_copy:
    """By the threads of a partition."""

    @staticmethod
    def async_copy_global_to_shared(
        result: SharedMemory, pointer: Pointer, mask: Tile | None = None
    ) -> None:
        partition = current()

        def land() -> None:
            result.write(pointer.load(mask, other=0))
            result.hide(partition)

        result.poison()
        partition.copies.append(Work(f"copy to {result.name}", land))

    @staticmethod
    def commit_group() -> None:
        partition = current()
        partition.copy_groups.append(partition.copies)
        partition.copies = []

    @staticmethod
    def wait_group(num_outstanding: int) -> None:
        partition = current()
        num_awaited = max(len(partition.copy_groups) - num_outstanding, 0)
        awaited = [copy for group in partition.copy_groups[:num_awaited] for copy in group]
        _wait_for(awaited)
        del partition.copy_groups[:num_awaited]

    @staticmethod
    def mbarrier_arrive(barrier: Barrier, increment_count: bool) -> None:
        """Each thread arrives when its copies until here have landed."""
        assert not increment_count, "of another count than the barrier's"
        partition = current()
        copies = [copy for group in partition.copy_groups for copy in group] + partition.copies
        num_threads = 32 * partition.num_warps
        Work(f"arrival at {barrier.name}", lambda: barrier.arrive(num_threads), tuple(copies))


def fence_async_shared() -> None:
    """Products see what this partition's threads have written."""
    partition = current()
    for view in partition.unfenced:
        view.show()
    partition.unfenced = []


def mma_v2(a: Tile, b: Tile, acc: Tile) -> Tile:
    """By warps, which wait for it."""
    assert a.dtype is b.dtype, (a.dtype, b.dtype)
    return Tile(a.data.float() @ b.data.float() + acc.data, acc.layout)


class Product:
    """The result of `warpgroup_mma`, which nothing but the next product may use before the wait."""

    def __init__(self, shape: list[int], layout: Any) -> None:
        self.shape = shape
        self.layout = layout
        self.tile: Tile | None = None
        self.work: Work | None = None


def warpgroup_mma(
    a: SharedMemory | Tile,
    b: SharedMemory,
    acc: Tile | Product,
    use_acc: Any = True,
    is_async: bool = False,
) -> Product:
    """Reads its operands at some time until it is waited for. A partition's follow each other."""
    assert is_async, "products that wait for themselves"
    assert a.dtype is b.dtype, (a.dtype, b.dtype)
    assert [a.shape[0], b.shape[1]] == acc.shape, (a.shape, b.shape, acc.shape)
    is_sum = bool(use_acc)
    partition = current()
    product = Product(acc.shape, acc.layout)

    def multiply() -> None:
        left = a.read_by_product() if isinstance(a, SharedMemory) else a.data.float()
        result = left @ b.read_by_product()
        if is_sum:
            before = acc.tile if isinstance(acc, Product) else acc
            assert before is not None
            result = before.data + result
        product.tile = Tile(result, product.layout)

    partition.pause()
    product.work = Work("product", multiply, tuple(partition.products[-1:]))
    partition.products.append(product.work)
    return product


def warpgroup_mma_wait(num_outstanding: int, deps: list[Tile | Product]) -> Any:
    """`deps` as tiles, but for products that are still under way: one alone, or a tuple."""
    partition = current()
    num_awaited = max(len(partition.products) - num_outstanding, 0)
    _wait_for(partition.products[:num_awaited])
    del partition.products[:num_awaited]
    results = tuple(_after_wait(value) for value in deps)
    return results[0] if len(results) == 1 else results


def _wait_for(works: list[Work]) -> None:
    current().wait(lambda: all(work.is_done for work in works), lambda: f"the {works[-1].name}")


def _after_wait(value: Tile | Product) -> Tile | Product | None:
    if isinstance(value, Tile) or value.work in current().products:
        return value
    return value.tile
