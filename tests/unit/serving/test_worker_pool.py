# SPDX-License-Identifier: Apache-2.0
"""Which of several workers takes a request, and what one's end means for the others."""

import pytest
from in_memory import InMemoryTransport, make_engine

from pelton.core.errors import UnavailableError, WorkerLostError
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.serving.router.types import Policy
from pelton.serving.worker_client import WorkerClient
from pelton.serving.worker_pool import WorkerPool


def make_request(name: str, num_tokens: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4)
    return GenerateRequest(
        request_id=name, prompt_token_ids=[1] * num_tokens, sampling=sampling, seed=1
    )


async def make_pool(policy: Policy) -> tuple[WorkerPool, list[InMemoryTransport]]:
    pool = WorkerPool(2, policy, max_queue=100)
    transports = [InMemoryTransport(make_engine(f"?max_model_len={n}")) for n in (64, 32)]
    for index, transport in enumerate(transports):
        pool.use(index, await WorkerClient.over(transport, "test"), 1)
    return pool, transports


def take_one(pool: WorkerPool, name: str, num_tokens: int = 3) -> str:
    with pool.submit([make_request(name, num_tokens)]) as (stream, decision):
        stream.cancel()
    return decision.worker_id


async def test_each_in_turn() -> None:
    pool, _ = await make_pool(Policy.ROUND_ROBIN)
    assert [take_one(pool, str(i)) for i in range(4)] == ["0", "1", "0", "1"]
    assert [state.num_routed for state in pool.states] == [2, 2]


async def test_load_counts_until_the_reply_ends() -> None:
    pool, _ = await make_pool(Policy.LEAST_LOADED)
    with pool.submit([make_request("a")]) as (_, decision):
        others = {take_one(pool, str(i)) for i in range(8)}
    assert others == {"0", "1"} - {decision.worker_id}
    assert {take_one(pool, f"later {i}") for i in range(32)} == {"0", "1"}


async def test_a_prompt_counts_until_its_first_token() -> None:
    pool, transports = await make_pool(Policy.INPUT_LENGTH)
    with pool.submit([make_request("long", 20)]) as (_, decision):
        others = {take_one(pool, str(i)) for i in range(8)}
        assert others == {"0", "1"} - {decision.worker_id}
        transports[int(decision.worker_id)].worker.step()
        with pool.submit([make_request("short")]):
            assert take_one(pool, "later") == decision.worker_id


async def test_lost_worker_takes_nothing_and_fails_only_its_own() -> None:
    pool, transports = await make_pool(Policy.ROUND_ROBIN)
    with (
        pool.submit([make_request("a")]) as (lost, _),
        pool.submit([make_request("b")]) as (kept, _),
    ):
        transports[0].lose()
        assert {take_one(pool, str(i)) for i in range(3)} == {"1"}
        with pytest.raises(WorkerLostError):
            await anext(lost)
        transports[1].worker.step()
        assert await anext(kept)
    assert pool.num_up == 1
    pool.use(0, None, 1)
    pool.use(0, await WorkerClient.over(InMemoryTransport(make_engine()), "test"), 2)
    assert {take_one(pool, f"again {i}") for i in range(2)} == {"0", "1"}


async def test_quiet_worker_is_passed_over_unless_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = await make_pool(Policy.ROUND_ROBIN)
    first = pool.states[0].client
    monkeypatch.setattr(WorkerClient, "is_quiet", property(lambda client: client is first))
    assert {take_one(pool, str(i)) for i in range(3)} == {"1"}
    monkeypatch.setattr(WorkerClient, "is_quiet", True)
    assert {take_one(pool, f"all {i}") for i in range(3)} == {"0", "1"}


async def test_without_workers_nothing_is_taken() -> None:
    pool, transports = await make_pool(Policy.RANDOM)
    assert pool.info is not None
    assert pool.info.max_model_len == 32
    for transport in transports:
        transport.lose()
    assert pool.info is None
    with pytest.raises(UnavailableError, match="being loaded"):
        take_one(pool, "a")
