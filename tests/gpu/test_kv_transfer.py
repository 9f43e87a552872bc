# SPDX-License-Identifier: Apache-2.0
"""Blocks on a GPU that another process reads: by handle, within one card or between two."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

import msgspec
import numpy as np
import pytest
import torch
import zmq

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
    WorkerPlace,
)
from pelton.core.request import GenerateRequest, PrefillSource, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.serving.kv_transfer import cuda_ipc
from pelton.serving.kv_transfer.cuda_blocks import CudaBlocks
from pelton.serving.kv_transfer.cuda_ipc import CudaTransport
from pelton.serving.kv_transfer.host_blocks import HostBlocks
from pelton.serving.kv_transfer.link import KVLink
from pelton.serving.kv_transfer.transport import PoolHandle, Read
from pelton.serving.launcher import WorkerProcess

pytestmark = pytest.mark.gpu
OTHER_CARD = pytest.mark.parametrize(
    "other",
    [0, pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU"))],
)
"""Which card has the pool that is read; the reader's is the first."""

SHAPES = [(33, 2, 2, 16, 2, 8), (9, 4, 1, 16, 1, 36)]
"""Of two groups, small enough to lie in one allocation of torch's."""
SCRIPT = f"""
import sys, msgspec, torch
from pelton.serving.kv_transfer.cuda_ipc import CudaTransport

device = torch.device("cuda", int(sys.argv[1]))
torch.cuda.set_device(device)
torch.manual_seed(5)
caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in {SHAPES}]
torch.cuda.synchronize()
transport = CudaTransport(caches, is_shared=True)
print(msgspec.json.encode(transport.handle()).decode(), flush=True)
print(transport.digest(0, [3, 4, 9], b"key").hex(), flush=True)
print(msgspec.json.encode([c.float().cpu().tolist() for c in caches]).decode(), flush=True)
sys.stdin.read()
"""


@contextmanager
def giver(device: int) -> Iterator[tuple[PoolHandle, bytes, list[torch.Tensor], subprocess.Popen]]:
    arguments = [sys.executable, "-c", SCRIPT, str(device)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        handle = msgspec.json.decode(child.stdout.readline(), type=PoolHandle)
        digest = bytes.fromhex(child.stdout.readline().decode())
        caches = [torch.tensor(values) for values in msgspec.json.decode(child.stdout.readline())]
        yield handle, digest, caches, child
        child.kill()


def finish(read: Read) -> bytes:
    while True:
        try:
            next(read)
        except StopIteration as end:
            return end.value


def make_taker() -> tuple[CudaTransport, list[torch.Tensor]]:
    caches = [torch.zeros(shape, device="cuda:0", dtype=torch.bfloat16) for shape in SHAPES]
    return CudaTransport(caches, is_shared=False), caches


@OTHER_CARD
def test_copies_are_the_same_and_so_are_their_digests(other: int) -> None:
    taker, targets = make_taker()
    with giver(other) as (handle, digest, sources, child):
        pool = taker.open(handle)
        assert finish(pool.read(0, [3, 4, 9], [20, 21, 1], b"key")) == digest
        assert finish(pool.read(0, [3, 4, 9], [20, 21, 1], b"other")) != digest
        finish(pool.read(1, [8, 7], [1, 2], b""))
        assert torch.equal(targets[0][[20, 21, 1]].float().cpu(), sources[0][[3, 4, 9]])
        assert torch.equal(targets[1][[1, 2]].float().cpu(), sources[1][[8, 7]])
        assert not targets[0][2:20].any()
        with pytest.raises(OSError, match="are not among its 9"):
            finish(pool.read(1, [9], [1], b""))
        child.kill()
        child.wait()
        pool.close()
        pool.close()


@OTHER_CARD
def test_reads_run_side_by_side_after_the_steps_that_were_launched(
    other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker, targets = make_taker()
    block_bytes = targets[0][0].nbytes
    monkeypatch.setattr(cuda_ipc, "_MAX_BYTES_UNDER_WAY", 8 * block_bytes)
    with giver(other) as (handle, _, sources, child):
        pool = taker.open(handle)
        torch.cuda._sleep(10**9)
        step = torch.cuda.current_stream().record_event()
        # The third has no room before one of the others has come.
        ids = [[1, 2, 3, 4], [9, 7, 5, 11, 13], [20, 21]]
        reads = [pool.read(0, i, [j + 10 for j in i], b"") for i in ids]
        assert [next(read) for read in reads] == [0, 0, 0]
        assert len(pool._under_way) == 2
        assert not step.query()
        torch.cuda.synchronize()
        moved = [finish(read) for read in reversed(reads)]
        assert step.query()
        for i, digest in zip(reversed(ids), moved, strict=True):
            assert taker.digest(0, [j + 10 for j in i], b"") == digest
            assert torch.equal(targets[0][[j + 10 for j in i]].float().cpu(), sources[0][i])
        child.kill()
        child.wait()
        pool.close()


def test_a_read_that_is_closed_early_writes_no_more() -> None:
    taker, targets = make_taker()
    with giver(0) as (handle, digest, _, child):
        pool = taker.open(handle)
        with torch.cuda.stream(taker.blocks.stream):
            torch.cuda._sleep(10**8)
        pool.read(0, [3, 4, 9], [20, 21, 1], b"key").close()
        targets[0].zero_()
        torch.cuda.synchronize()
        assert not targets[0].any()
        assert finish(pool.read(0, [3, 4, 9], [20, 21, 1], b"key")) == digest
        child.kill()
        child.wait()
        pool.close()


@pytest.mark.parametrize("block_bytes", [4096, 1032, 288, 100, 6, 7])
def test_a_gpu_digests_as_a_cpu_does(block_bytes: int) -> None:
    blocks = torch.randint(0, 256, (40, block_bytes), dtype=torch.uint8)
    host, device = HostBlocks([blocks.numpy()]), CudaBlocks([blocks.cuda()])
    for ids in ([3, 4, 5, 39, 7], [], [1]):
        assert device.digest(0, ids, b"key") == host.digest(0, ids, b"key")


def test_what_has_landed_is_copied_as_on_a_cpu_after_the_step_under_way() -> None:
    landed = torch.randint(0, 256, (8 * 288,), dtype=torch.uint8)
    blocks = CudaBlocks([torch.zeros(20, 288, dtype=torch.uint8, device="cuda")])
    host = HostBlocks([torch.zeros(20, 288, dtype=torch.uint8).numpy()])
    landing = blocks.make_landing(8 * 288)
    landing.copy_(landed)
    torch.cuda._sleep(10**8)
    blocks.caches[0].fill_(7)  # by a step that is still under way
    host.groups[0].fill(7)
    digests = blake2b(b"key"), blake2b(b"key")

    blocks.copy_in(blocks.as_blocks(landing, 288), 1, 0, 5, 3, digests[0])
    host.copy_in(host.as_blocks(landed.numpy(), 288), 1, 0, 5, 3, digests[1])

    assert digests[0].digest() == digests[1].digest()
    np.testing.assert_array_equal(blocks.caches[0].cpu().numpy(), host.groups[0])


def test_a_digest_does_not_wait_for_the_step_under_way() -> None:
    taker, targets = make_taker()
    targets[0].normal_()
    torch.cuda.synchronize()
    before = taker.digest(0, [3, 5], b"key")
    torch.cuda._sleep(10**9)
    step = torch.cuda.current_stream().record_event()
    assert taker.digest(0, [3, 5], b"key") == before
    assert not step.query()


CONFIG = EngineConfig(
    model=ModelConfig(dtype=DType.FLOAT32, max_model_len=512),
    cache=CacheConfig(kv_memory_bytes=2**28),
    scheduler=SchedulerConfig(max_num_requests=8, max_num_batched_tokens=128),
)
LENGTHS = (1, 15, 16, 17, 33, 300)


def make_requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(length),
            prompt_token_ids=[(17 * i * i + length) % 40000 + 300 for i in range(length)],
            sampling=SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
            seed=1,
        )
        for length in LENGTHS
    ]


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


def test_a_prefill_worker_of_the_same_card_gives_the_tokens_of_one_engine(smollm2: str) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, model=smollm2))
    expected = run(make_engine(config), make_requests())
    link = KVLink(Role.DECODE, zmq.Poller())
    engine = make_engine(config, place=WorkerPlace(role=Role.DECODE), connect=link.connect)
    place = WorkerPlace(role=Role.PREFILL)
    with WorkerProcess(config, place=place) as worker:
        worker.wait_ready(300)
        source = PrefillSource(address=worker.address, min_tokens=2)
        requests = [replace(request, prefill_at=source) for request in make_requests()]
        assert run(engine, requests) == expected
        stats = engine.stats()
        assert (stats.pulls_total, stats.pull_fallbacks_total) == (len(LENGTHS) - 1, 0)
        assert stats.pulled_bytes_total > 0

        # Without it the prompts are computed here, and nothing of it stays mapped.
        again = [
            replace(request, prompt_token_ids=request.prompt_token_ids[::-1])
            for request in requests
        ]
        for request in again:
            engine.add(request)
        worker.kill()
        while engine.has_work:
            engine.step()
        link.read_idle()
        assert engine.stats().num_used_blocks == 0
        assert link.num_peers == 0
    link.close()
