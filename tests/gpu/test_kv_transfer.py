# SPDX-License-Identifier: Apache-2.0
"""Blocks on a GPU that another process reads: by handle, within one card or between two."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
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
from pelton.serving.kv_transfer.cuda_ipc import CudaTransport
from pelton.serving.kv_transfer.link import KVLink
from pelton.serving.kv_transfer.transport import PoolHandle, Read
from pelton.serving.launcher import WorkerProcess

pytestmark = pytest.mark.gpu

SHAPES = [(33, 2, 2, 16, 2, 8), (9, 4, 1, 16, 1, 36)]
"""Of two groups, small enough to lie in one allocation of torch's."""
SCRIPT = f"""
import sys, msgspec, torch
from pelton.serving.kv_transfer.cuda_ipc import CudaTransport

device = torch.device("cuda", int(sys.argv[1]))
torch.cuda.set_device(device)
torch.manual_seed(5)
caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in {SHAPES}]
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


@pytest.mark.parametrize("other", [0, 1])
def test_copies_are_the_same_and_so_are_their_digests(other: int) -> None:
    if other >= torch.cuda.device_count():
        pytest.skip("one GPU")
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
