# SPDX-License-Identifier: Apache-2.0
"""Asks Linux to back weights and KV on a CPU with huge pages.

A decode step reads every weight and each request's blocks once; with pages of 4 KiB much of that
time goes into address translation, above all in a virtual machine.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

_HUGE_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def advise_huge_pages(maps: Path = Path("/proc/self/maps")) -> int:
    """For all memory of this process that is private and belongs to no file, present and, where
    the same mappings grow, future. Returns the bytes that the kernel took the advice for: 0 where
    it knows no huge pages. Only speed depends on it."""
    if not maps.exists():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for start, end in _large_anonymous(maps.read_text()):
        if madvise(start, end - start, _MADV_HUGEPAGE) == 0:
            num_bytes += end - start
            # At once, instead of whenever the kernel's own thread comes by; not in old kernels.
            madvise(start, end - start, _MADV_COLLAPSE)
    return num_bytes


def _large_anonymous(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        is_ours = inode == "0" and (not path or path[0] == "[heap]")
        if permissions == "rw-p" and is_ours and end - start >= _HUGE_PAGE_BYTES:
            yield start, end
