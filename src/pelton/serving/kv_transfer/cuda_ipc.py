# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between GPUs of one host, or within one: the reader maps the other's pool.

The driver gives a handle for a pool's memory, which another process turns into an address; copies
between GPUs go over NVLink or PCIe without the host. They are ordered on the stream that the engine
computes on: after the steps that were launched, before those that will be. So a block that is
copied into has nobody else who writes to it, and a read waits for the steps in flight. The mapping
keeps the other's memory, so it is closed as soon as the other is gone.
"""

import ctypes
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from pelton.core.errors import ConfigError
from pelton.serving.kv_transfer.cuda_blocks import CudaBlocks
from pelton.serving.kv_transfer.transport import PoolHandle, Read, check_ids, find_runs

KIND = "cuda-ipc"
_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


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

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy between any two devices."""
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyAsync", *addresses, ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))


class CudaTransport:
    """Implements `KVTransport` for a pool on a GPU."""

    def __init__(self, caches: Sequence[Tensor], *, is_shared: bool) -> None:
        """`caches` are this pool's groups, blocks first; `is_shared`: others may read them."""
        self._caches = caches
        self._blocks = CudaBlocks(caches)
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
        """Waits for the device."""
        return self._blocks.digest(group, block_ids, key)

    def open(self, handle: PoolHandle) -> "CudaPool":
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not on a GPU")
        groups = msgspec.msgpack.decode(handle.payload, type=list[_Group])
        if [group.block_bytes for group in groups] != [cache[0].nbytes for cache in self._caches]:
            raise OSError("its blocks have other sizes")
        return CudaPool(groups, self, self._caches, self._driver)


class CudaPool:
    """Implements `RemotePool`: another process's pool, at an address of this one."""

    def __init__(
        self,
        groups: Sequence[_Group],
        transport: CudaTransport,
        targets: Sequence[Tensor],
        driver: _Driver,
    ) -> None:
        self._groups, self._targets = groups, targets
        self._transport, self._driver = transport, driver
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
        """Waits for the device, so that the other may have its blocks back."""
        source, size = self._groups[group], self._groups[group].block_bytes
        check_ids(source_ids, source.num_blocks)
        first_source = self._bases[source.memory] + source.offset
        first_target = self._targets[group].data_ptr()
        stream = torch.cuda.current_stream(self._targets[group].device).cuda_stream
        for source_id, target_id, count in find_runs(source_ids, target_ids):
            self._driver.copy(
                first_target + target_id * size,
                first_source + source_id * size,
                count * size,
                stream,
            )
        digest = self._transport.digest(group, target_ids, key)
        yield len(target_ids) * size
        return digest

    def close(self) -> None:
        for base in self._bases.values():
            self._driver.close(base)
        self._bases = {}
