# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between GPUs of one host, or within one: the reader maps the other's pool.

The driver gives a handle for a pool's memory, which another process turns into an address; a kernel
there copies blocks over NVLink or PCIe and adds up their words on the way. It runs on a stream of
its own, after the steps that were launched by then: so a block that is copied into has nobody else
who writes to it. Steps that are launched later run beside it; none reads the blocks before their
digest has come to the host. The mapping keeps the other's memory, so it is closed as soon as the
other is gone.
"""

import ctypes
from collections.abc import Sequence

import msgspec
from torch import Tensor

from pelton.core.errors import ConfigError
from pelton.serving.kv_transfer.cuda_blocks import BlockSums, CudaBlocks
from pelton.serving.kv_transfer.transport import PoolHandle, Read, check_ids

KIND = "cuda-ipc"
_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_MAX_BYTES_UNDER_WAY = 256 * 2**20
"""From one pool, for more than two reads: with so many a third does not start, as one that is
closed waits for all in front of it. They come one after the other, so the card has no more to do
at a time."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class _Group(msgspec.Struct, array_like=True, frozen=True):
    memory: bytes
    """The handle of the allocation that the group lies in."""
    offset: int
    num_blocks: int
    block_bytes: int


class _Driver:
    """The CUDA driver's functions that torch does not offer. Errors are `OSError`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")

    def find_base(self, address: int) -> int:
        """Where the allocation begins that holds `address`."""
        base, size, pointer = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        return base.value

    def export(self, base: int) -> bytes:
        """The handle of an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, memory: bytes) -> int:
        """The address of another process's allocation in this one."""
        handle, base = _IpcHandle.from_buffer_copy(memory), ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, flags)
        return base.value

    def close(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


class CudaTransport:
    """Implements `KVTransport` for a pool on a GPU."""

    def __init__(self, caches: Sequence[Tensor], *, is_shared: bool) -> None:
        """`caches` are this pool's groups, blocks first; `is_shared`: others may read them."""
        self._caches = caches
        self.blocks = CudaBlocks(caches)
        self._is_shared = is_shared
        self._driver = _Driver()

    def handle(self) -> PoolHandle | None:
        if not self._is_shared:
            return None
        try:
            bases = [self._driver.find_base(cache.data_ptr()) for cache in self._caches]
            handles = {base: self._driver.export(base) for base in bases}
        except OSError as error:
            raise ConfigError(
                f"The KV cache cannot be shared between processes ({error}): do without"
                " PYTORCH_CUDA_ALLOC_CONF, or use --workers."
            ) from error
        groups = [
            _Group(handles[base], cache.data_ptr() - base, cache.shape[0], cache[0].nbytes)
            for base, cache in zip(bases, self._caches, strict=True)
        ]
        return PoolHandle(KIND, msgspec.msgpack.encode(groups))

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        """Waits for the device, though not for the steps that are under way there."""
        return self.blocks.digest(group, block_ids, key)

    def open(self, handle: PoolHandle) -> "CudaPool":
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not on a GPU")
        groups = msgspec.msgpack.decode(handle.payload, type=list[_Group])
        if [group.block_bytes for group in groups] != [cache[0].nbytes for cache in self._caches]:
            raise OSError("its blocks have other sizes")
        return CudaPool(groups, self.blocks, self._driver)


class CudaPool:
    """Implements `RemotePool`: another process's pool, at an address of this one."""

    def __init__(self, groups: Sequence[_Group], targets: CudaBlocks, driver: _Driver) -> None:
        self._groups, self._targets, self._driver = groups, targets, driver
        self._under_way: list[tuple[BlockSums, int]] = []
        """And how many bytes; some may have come."""
        self._bases: dict[bytes, int] = {}
        try:
            for group in groups:
                if group.memory not in self._bases:
                    self._bases[group.memory] = driver.open(group.memory)
        except OSError:
            self.close()
            raise

    def read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        """The copies are under way when it returns, unless too many are. Raises as the read
        does."""
        check_ids(source_ids, self._groups[group].num_blocks)
        read = self._read(group, source_ids, target_ids, key)
        next(read)
        return read

    def _read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        while not self._has_room():
            yield 0
        sums = self._start(group, source_ids, target_ids)
        try:
            yield 0
            while not sums.is_here:
                yield 0
        finally:
            sums.wait()  # of a read that is closed early: it would still write
        yield len(target_ids) * self._groups[group].block_bytes
        return sums.digest(key)

    def _start(self, group: int, source_ids: Sequence[int], target_ids: Sequence[int]) -> BlockSums:
        source = self._groups[group]
        address = self._bases[source.memory] + source.offset
        sums = self._targets.start_copies(group, target_ids, source_ids, address)
        self._under_way.append((sums, len(target_ids) * source.block_bytes))
        return sums

    def _has_room(self) -> bool:
        self._under_way = [item for item in self._under_way if not item[0].is_here]
        # The second keeps the way between the cards busy while the host looks at the first.
        num_bytes = sum(num_bytes for _, num_bytes in self._under_way)
        return len(self._under_way) < 2 or num_bytes < _MAX_BYTES_UNDER_WAY

    def close(self) -> None:
        for base in self._bases.values():
            self._driver.close(base)
        self._bases = {}
