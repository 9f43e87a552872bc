# SPDX-License-Identifier: Apache-2.0
"""Memory that other processes of this user can map while this one lives.

It has no name in any file system: the kernel frees it when the last process that maps it ends,
however that ends, so nothing can be left behind. Linux only.
"""

import mmap
import os
import uuid

PAGE_BYTES = mmap.PAGESIZE


class SharedMemory:
    def __init__(self, num_bytes: int) -> None:
        """A page costs nothing until it is written to."""
        self.name = f"pelton-kv-{uuid.uuid4().hex}"
        """Unique: whoever maps it checks that this process has not been replaced by another."""
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self.buffer = mmap.mmap(self.fd, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def map_shared_memory(pid: int, fd: int, name: str, num_bytes: int) -> mmap.mmap:
    """Maps, to read from, what `SharedMemory` made in process `pid`. Raises `OSError` where the
    process is gone, is another one by now, or is not this user's."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.readlink(f"/proc/self/fd/{mine}")
        if not found.startswith(f"/memfd:{name} ") or os.fstat(mine).st_size < num_bytes:
            raise OSError(f"{found!r} is not the memory {name!r}")
        return mmap.mmap(mine, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(mine)
