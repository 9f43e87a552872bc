# SPDX-License-Identifier: Apache-2.0
"""KV through NIXL, over UCX and TCP on the loopback device: right, and never waited for in vain."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from zmq import Poller

from kv_cases import make_engine_of, make_request, make_requests, run_alone, run_pair
from kv_pair import Pair
from pelton.core.clock import ManualClock
from pelton.core.config import Role
from pelton.core.errors import ConfigError
from pelton.serving.kv_transfer import link, nixl, nixl_pool, silence
from pelton.serving.kv_transfer.host_blocks import HostBlocks
from pelton.serving.kv_transfer.link import KVLink
from pelton.serving.kv_transfer.nixl import NixlTransport
from pelton.serving.kv_transfer.nixl_pool import NixlPool
from pelton.serving.kv_transfer.transport import PoolHandle, Read

BLOCK_BYTES, NUM_BLOCKS = 2**19, 65
SCRIPT = f"""
import os, sys, msgspec, numpy as np
out = os.dup(1)
os.dup2(2, 1)
from pelton.serving.kv_transfer.host_blocks import HostBlocks
from pelton.serving.kv_transfer.nixl import NixlTransport
groups = [np.empty((9, 36), np.uint8), np.empty(({NUM_BLOCKS}, {BLOCK_BYTES}), np.uint8)]
for group in groups:
    group[:] = np.arange(len(group))[:, None]
transport = NixlTransport(HostBlocks(groups), is_shared=True)
os.write(out, msgspec.json.encode(transport.handle()) + b"\\n")
sys.stdin.read()
"""
WHOLE = list(range(1, NUM_BLOCKS))

needs_nixl = pytest.mark.usefixtures("loopback")


@pytest.fixture
def loopback(monkeypatch) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (extra kv)")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")


@contextmanager
def giver() -> Iterator[tuple[PoolHandle, subprocess.Popen[bytes]]]:
    """Another process with a pool, each of whose bytes is the number of its block."""
    arguments = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield msgspec.json.decode(child.stdout.readline(), type=PoolHandle), child
        child.kill()


def make_taker() -> NixlTransport:
    groups = [np.zeros((9, 36), np.uint8), np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)]
    return NixlTransport(HostBlocks(groups), is_shared=False)


def finish(read: Read) -> bytes:
    while True:
        try:
            if not next(read):
                time.sleep(0.001)
        except StopIteration as end:
            return end.value


def num_free(transport: NixlTransport) -> int:
    transport._reclaim()
    assert not transport._given_up
    return len(transport._free)


@needs_nixl
def test_answers_are_those_of_one_engine() -> None:
    requests = make_requests((1, 17, 49, 100))
    alone = run_alone(make_engine_of("gpt-oss", Role.MIXED, None), requests)
    with Pair(partial(make_engine_of, "gpt-oss"), transport="nixl") as pair:
        assert run_pair(pair, requests) == alone
        stats = pair.decode.stats()
        assert (stats.pulls_total, stats.pull_fallbacks_total) == (3, 0)


@needs_nixl
def test_restarts_at_one_address_and_requests_that_end_early() -> None:
    with Pair(partial(make_engine_of, "llama", prefix_cache=False), transport="nixl") as pair:
        for number in range(2):
            answers = run_pair(pair, [make_request(str(number), 100, max_tokens=2)])
            assert len(answers[str(number), 0].token_ids) == 2
            pair.add(make_request("cancelled", 110))
            while not pair.prefill.leases.num_blocks:
                pair.pump()
            pair.decode.cancel("cancelled")
            pair.kill_prefill()
            pair.until(lambda: not pair._decode_link.num_peers)
            pair.start_prefill(keeps_address=True)
        stats = pair.decode.stats()
        assert (stats.pulls_total, stats.pull_fallbacks_total) == (2, 0)


@needs_nixl
def test_copies_are_right_and_what_a_frozen_peer_sends_too_late_is_written_nowhere(
    monkeypatch,
) -> None:
    taker = make_taker()
    groups = taker.blocks.groups
    with giver() as (handle, child):
        pool = taker.open(handle)
        for group, source, target in ((0, [3, 4, 8], [1, 2, 7]), (1, [1, 2, 9, 5], [8, 9, 3, 2])):
            digest = finish(pool.read(group, source, target, b"key"))
            assert digest == taker.digest(group, target, b"key")
            for source_id, target_id in zip(source, target, strict=True):
                assert (groups[group][target_id] == source_id).all()
        with pytest.raises(OSError, match="are not among its 9"):
            finish(pool.read(0, [9], [1], b""))

        child.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(nixl_pool, "PATIENCE_S", 0.2)
            with pytest.raises(ConnectionError, match=r"nothing has come for 0\.2 s"):
                finish(pool.read(1, WHOLE, WHOLE, b""))
        assert taker._given_up
        pool.close()
        pool.close()
        groups[1][:] = 77
        child.send_signal(signal.SIGCONT)
        while taker._given_up:
            taker._reclaim()
        assert (groups[1] == 77).all()
        pool = taker.open(handle)
        finish(pool.read(1, [5], [7], b""))
        assert (groups[1][7] == 5).all()
        pool.close()


@needs_nixl
def test_a_peer_killed_on_the_way_is_noticed_and_its_successor_used() -> None:
    taker = make_taker()
    with giver() as (handle, child):
        pool = taker.open(handle)
        finish(pool.read(0, [1], [1], b""))
        child.send_signal(signal.SIGSTOP)
        read = pool.read(1, WHOLE, WHOLE, b"")
        assert not next(read)
        child.kill()
        with pytest.raises(ConnectionError, match="broke"):
            finish(read)
        pool.close()
    assert num_free(taker) == nixl_pool._MAX_LANDINGS
    with giver() as (handle, _):
        pool = taker.open(handle)
        assert finish(pool.read(0, [3], [1], b"")) == taker.digest(0, [1], b"")
        pool.close()
    assert num_free(taker) == nixl_pool._MAX_LANDINGS
    assert not taker._users


@needs_nixl
def test_other_pools_are_not_opened() -> None:
    taker = make_taker()
    other = NixlTransport(HostBlocks([np.zeros((4, 8), np.uint8)]), is_shared=True).handle()
    assert other is not None
    with pytest.raises(OSError, match="other sizes"):
        taker.open(other)
    with pytest.raises(OSError, match="cuda-ipc"):
        taker.open(PoolHandle("cuda-ipc", b""))
    assert taker.handle() is None


class Agent:
    """Stands in for NIXL's: transfers end when the test says so, and bring nothing."""

    name, state = "me", "PROC"

    def __init__(self) -> None:
        self.posted: list[SimpleNamespace] = []
        self.peers: list[str] = []

    def register_memory(self, memory: object, segment: str) -> None: ...
    def transfer(self, handle: SimpleNamespace) -> None: ...
    def release_xfer_handle(self, handle: SimpleNamespace) -> None: ...

    def add_remote_agent(self, metadata: bytes) -> None:
        self.peers.append(metadata.decode())

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_xfer_descs(self, entries: object, segment: str) -> object:
        return entries

    def initialize_xfer(self, *arguments: object) -> SimpleNamespace:
        self.posted.append(SimpleNamespace(state=self.state))
        return self.posted[-1]

    def check_xfer_state(self, handle: SimpleNamespace) -> str:
        return handle.state


@pytest.fixture
def agent(monkeypatch) -> Agent:
    """A landing holds a block of `open_pool`'s."""
    agent = Agent()
    monkeypatch.setattr(nixl, "require_nixl", lambda: None)
    monkeypatch.setattr(nixl, "_make_agent", lambda: (agent, (RuntimeError,)))
    monkeypatch.setattr(nixl, "_LANDING_BYTES", 64)
    return agent


@pytest.fixture
def clock(monkeypatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=clock.now_s))
    return clock


def open_pool(*, copies_aside: bool = False) -> tuple[NixlTransport, NixlPool]:
    """Without `copies_aside` as on a GPU."""
    blocks = HostBlocks([np.zeros((40, 64), np.uint8)])
    blocks.may_copy_aside = copies_aside
    taker = NixlTransport(blocks, is_shared=True)
    handle = taker.handle()
    assert handle is not None
    return taker, taker.open(handle)


class Copies:
    """Of a pool's blocks; each waits until it may go on."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._copy_in, blocks.copy_in = blocks.copy_in, self
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_done = 0

    def __call__(self, *arguments: object) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        self._copy_in(*arguments)
        self.num_done += 1


def num_copiers() -> int:
    return sum(thread.name.startswith("kv-copy") for thread in threading.enumerate())


def test_transfers_start_with_the_read_and_the_next_one_before_a_copy(agent, monkeypatch) -> None:
    taker, pool = open_pool()
    num_posted: list[int] = []
    monkeypatch.setattr(taker.blocks, "copy_in", lambda *_: num_posted.append(len(agent.posted)))
    first = pool.read(0, range(1, 4), range(1, 4), b"")
    second = pool.read(0, range(4, 20), range(4, 20), b"")
    assert len(agent.posted) == nixl_pool._MAX_LANDINGS
    for transfer in agent.posted:
        transfer.state = "DONE"
    assert [next(first), next(first), next(first), next(second), next(second)] == [64] * 5
    assert num_posted == [9, 10, 11, 12, 13]
    second.close()


def test_on_a_cpu_transfers_are_posted_while_a_copy_is_made(agent) -> None:
    agent.state = "DONE"
    taker, pool = open_pool(copies_aside=True)
    copies = Copies(taker.blocks)
    first = pool.read(0, range(1, 8), range(1, 8), b"")
    assert copies.has_begun.wait(60)
    second = pool.read(0, range(8, 20), range(8, 20), b"key")
    assert next(first) == 0
    assert len(agent.posted) == nixl_pool._MAX_LANDINGS + 1
    copies.may_end.set()
    for read, blocks, key in ((first, range(1, 8), b""), (second, range(8, 20), b"key")):
        assert finish(read) == taker.digest(0, blocks, key)
    assert num_free(taker) == nixl_pool._MAX_LANDINGS + 1
    pool.close()
    assert num_copiers() == 0


def test_a_read_that_is_closed_is_copied_no_more(agent, monkeypatch) -> None:
    agent.state = "DONE"
    taker, pool = open_pool(copies_aside=True)
    copies = Copies(taker.blocks)
    read = pool.read(0, range(1, 8), range(1, 8), b"")
    assert copies.has_begun.wait(60)

    def sleep(seconds: float) -> None:
        copies.may_end.set()
        time.sleep(seconds)

    monkeypatch.setattr(nixl_pool, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    read.close()
    assert copies.num_done == 1
    assert num_free(taker) == 7
    pool.close()
    assert (copies.num_done, num_copiers()) == (1, 0)


def test_what_a_copy_raises_is_raised_by_the_read(agent, monkeypatch) -> None:
    agent.state = "DONE"
    taker, pool = open_pool(copies_aside=True)
    monkeypatch.setattr(taker.blocks, "copy_in", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        finish(pool.read(0, range(1, 8), range(1, 8), b""))
    assert (len(pool._unsent), pool.num_landings) == (0, 0)
    assert num_free(taker) == taker._num_landings
    pool.close()


def test_reads_that_are_dropped_in_any_order_leave_nothing(agent) -> None:
    agent.state = "DONE"
    taker, pool = open_pool()
    reads = [pool.read(0, range(1, 10), range(1, 10), b"") for _ in range(3)]
    for _ in range(12):
        next(reads[1])  # what the first one wants comes, too
    for read in (reads[0], reads[2], reads[1]):
        read.close()
    assert (len(pool._unsent), pool.num_landings) == (0, 0)
    assert num_free(taker) == nixl_pool._MAX_LANDINGS + 1


def test_a_read_leaves_landings_to_those_before_it(agent) -> None:
    _, pool = open_pool()
    agent.state = "DONE"
    reads = [pool.read(0, range(1, 10), range(1, 10), b"") for _ in range(2)]
    for _ in range(4):
        reads.append(pool.read(0, range(1, 10), range(1, 10), b""))
        assert sum(islice(reads.pop(0), 20)) == 64 * 9
    for read in reads:
        read.close()
    assert (len(pool._unsent), pool.num_landings) == (0, 0)


def look_for(seconds: int, clock: ManualClock, *reads: Read) -> None:
    """And find nothing."""
    for _ in range(seconds):
        clock.advance(1.0)
        assert not any(next(read) for read in reads)


def test_a_read_that_waits_for_the_landings_of_another_does_not_count_as_silence(
    agent, clock
) -> None:
    taker, pool = open_pool()
    long = pool.read(0, range(1, 30), range(1, 30), b"")
    other = pool.read(0, [30], [30], b"")
    assert next(long) == next(other) == 0
    for number in range(5):
        look_for(6, clock, long, other)
        agent.posted[number].state = "DONE"
        assert next(long) == 64
    look_for(10, clock, long, other)
    clock.advance(1.0)
    with pytest.raises(ConnectionError, match="nothing has come"):
        next(other)
    long.close()
    pool.close()
    assert agent.peers == ["me"]  # what was given up may still write
    for transfer in agent.posted:
        transfer.state = "DONE"
    assert num_free(taker) == nixl_pool._MAX_LANDINGS + 1
    assert agent.peers == []


def test_time_in_which_nobody_looks_is_not_silence(agent, clock) -> None:
    _, pool = open_pool()
    read = pool.read(0, [1], [1], b"")
    for _ in range(2):
        clock.advance(5 * nixl_pool.PATIENCE_S)
        assert next(read) == 0
    look_for(8, clock, read)
    clock.advance(1.0)
    with pytest.raises(ConnectionError, match="nothing has come"):
        next(read)


def test_there_are_no_more_landings_than_were_set_aside(agent, clock, monkeypatch) -> None:
    monkeypatch.setattr(nixl, "MAX_LANDINGS_OF_ALL", 3)
    taker, pool = open_pool()
    other = NixlPool(pool.payload, taker)
    long = pool.read(0, range(1, 6), range(1, 6), b"")
    waiting = other.read(0, [7], [7], b"")
    look_for(20, clock, waiting)  # its peer was asked for nothing yet, so is not silent
    assert len(agent.posted) == 3
    agent.posted[0].state = "DONE"
    assert next(long) == 64
    assert next(waiting) == 0
    assert len(agent.posted) == 4
    for transfer in agent.posted:
        transfer.state = agent.state = "DONE"
    assert sum(waiting) + sum(long) == 5 * 64
    assert num_free(taker) == 3


def test_whoever_has_a_landing_leaves_the_next_to_whoever_has_none(agent, monkeypatch) -> None:
    monkeypatch.setattr(nixl, "MAX_LANDINGS_OF_ALL", 3)
    taker, pool = open_pool()
    long = pool.read(0, range(1, 30), range(1, 30), b"")
    waiting = NixlPool(pool.payload, taker).read(0, [31, 32], [31, 32], b"")
    agent.posted[0].state = "DONE"
    assert next(long) == 64
    assert next(long) == 0
    assert len(agent.posted) == 3
    assert next(waiting) == 0
    assert len(agent.posted) == 4
    agent.posted[3].state = "DONE"
    assert next(waiting) == 64
    assert next(waiting) == 0
    assert len(agent.posted) == 5
    given_up = NixlPool(pool.payload, taker).read(0, [33], [33], b"")
    assert next(given_up) == 0
    assert taker._without
    given_up.close()
    assert not taker._without
    waiting.close()
    long.close()


def test_landings_on_a_gpu_are_in_its_memory_plan(monkeypatch) -> None:
    monkeypatch.setattr(link, "require_nixl", lambda: None)
    decode = KVLink(Role.DECODE, Poller(), "nixl")
    assert decode.find_landing_bytes(2**20) == nixl.MAX_LANDINGS_OF_ALL * 4 * 2**20
    assert decode.find_landing_bytes(2**24) == nixl.MAX_LANDINGS_OF_ALL * 2**24
    assert KVLink(Role.PREFILL, Poller(), "nixl").find_landing_bytes(2**20) == 0
    assert KVLink(Role.DECODE, Poller()).find_landing_bytes(2**20) == 0


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(ConfigError, match=r"pip install 'pelton\[kv\]'"):
        KVLink(Role.DECODE, Poller(), "nixl")


def test_a_transport_between_gpus_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="does not move KV between CPUs"):
        make_engine_of("llama", Role.PREFILL, KVLink(Role.PREFILL, Poller(), "cuda-ipc").connect)
