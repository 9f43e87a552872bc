# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks between pools, their digests, and memory that leaves nothing behind."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory, map_shared_memory
from pelton.serving.kv_transfer.host_blocks import Blocks, HostBlocks
from pelton.serving.kv_transfer.shared_memory import SharedMemoryTransport
from pelton.serving.kv_transfer.transport import PoolHandle, Read, find_runs

KEY = b"key"


def finish(read: Read) -> bytes:
    while True:
        try:
            assert next(read)
        except StopIteration as end:
            return end.value


def make_pool(sizes: list[int], num_blocks: int = 9) -> tuple[SharedMemory, list[Blocks]]:
    """Random bytes."""
    pages = [-(-size * num_blocks // PAGE_BYTES) for size in sizes]
    memory = SharedMemory(sum(pages) * PAGE_BYTES)
    groups, start = [], 0
    for size, count in zip(sizes, pages, strict=True):
        group = np.frombuffer(memory.buffer, np.uint8, size * num_blocks, start)
        groups.append(group.reshape(num_blocks, size))
        groups[-1][:] = np.random.default_rng(size).integers(0, 256, groups[-1].shape, np.uint8)
        start += count * PAGE_BYTES
    return memory, groups


def make_pair(sizes: list[int]) -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    memory, groups = make_pool(sizes)
    targets = [np.zeros((20, size), np.uint8) for size in sizes]
    giver = SharedMemoryTransport(HostBlocks(groups), memory, os.getpid())
    return giver, SharedMemoryTransport(HostBlocks(targets), None, os.getpid())


@pytest.mark.parametrize("size", [1, 3, 8, 36, 1024, 18432, 2**20 + 8])
def test_copies_are_the_same_and_so_are_their_digests(size: int) -> None:
    giver, taker = make_pair([64, size])
    handle = giver.handle()
    assert handle is not None
    pool = taker.open(handle)
    source, target = [1, 2, 3, 8, 5, 4], [7, 8, 9, 1, 2, 15]
    digest = finish(pool.read(1, source, target, KEY))
    np.testing.assert_array_equal(taker._blocks.groups[1][target], giver._blocks.groups[1][source])
    assert digest == giver.digest(1, source, KEY) == taker.digest(1, target, KEY)
    pool.close()
    pool.close()


def test_a_digest_tells_bytes_order_and_keys_apart() -> None:
    giver, _ = make_pair([2048])
    digests = {giver.digest(0, ids, key) for ids in ([1, 2], [2, 1], [1]) for key in (KEY, b"")}
    blocks = giver._blocks.groups[0]
    for place in (0, 1023, 2047):
        blocks[1, place] ^= 1
        digests.add(giver.digest(0, [1, 2], KEY))
    assert len(digests) == 9


def test_runs_are_consecutive_on_both_sides() -> None:
    runs = list(find_runs([1, 2, 3, 5, 6, 7], [4, 5, 6, 7, 9, 10]))
    assert runs == [(1, 4, 3), (5, 7, 1), (6, 9, 2)]
    assert list(find_runs([], [])) == []


@pytest.mark.parametrize("source", [[0], [9], [1, 100], [-1]])
def test_blocks_that_are_not_there_are_not_read(source: list[int]) -> None:
    giver, taker = make_pair([64])
    handle = giver.handle()
    assert handle is not None
    pool = taker.open(handle)
    with pytest.raises(OSError, match="are not among its 9"):
        finish(pool.read(0, source, [1] * len(source), KEY))
    pool.close()


def test_pools_of_other_sizes_or_kinds_are_not_opened() -> None:
    giver, _ = make_pair([64])
    handle = giver.handle()
    assert handle is not None
    _, taker = make_pair([128])
    with pytest.raises(OSError, match="other sizes"):
        taker.open(handle)
    with pytest.raises(OSError, match="cuda"):
        taker.open(PoolHandle("cuda", b""))
    assert taker.handle() is None


def test_memory_of_another_process_is_read_and_outlives_it() -> None:
    script = (
        "import os, sys\n"
        "from pelton.engine.kv.shared_memory import SharedMemory\n"
        "memory = SharedMemory(8192)\n"
        "memory.buffer[:5] = b'hello'\n"
        "print(os.getpid(), memory.fd, memory.name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", script]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid, fd, name = child.stdout.readline().split()
        mapped = map_shared_memory(int(pid), int(fd), name, 8192)
        with pytest.raises(OSError, match="not the memory"):
            map_shared_memory(int(pid), int(fd), "another", 8192)
        with pytest.raises(OSError, match="not the memory"):
            map_shared_memory(int(pid), int(fd), name, 8193)
        child.kill()
    assert mapped[:5] == b"hello"
    with pytest.raises(TypeError):
        mapped[0] = 1  # only its owner writes
    mapped.close()
    with pytest.raises(OSError, match="No such"):
        map_shared_memory(int(pid), int(fd), name, 8192)


def test_memory_goes_with_its_last_user() -> None:
    gc.collect()
    before = open_files()
    memory, groups = make_pool([64])
    assert len(open_files()) > len(before)
    del memory, groups
    gc.collect()
    assert open_files() == before


def open_files() -> list[str]:
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    return [link for link in links if "pelton-kv" in link]
