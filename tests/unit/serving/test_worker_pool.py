# SPDX-License-Identifier: Apache-2.0
"""Which of several workers takes a request, and what one's end means for the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from in_memory import InMemoryTransport, make_engine

from pelton.core.config import Role
from pelton.core.errors import PeltonError, UnavailableError, WorkerLostError
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.serving.request_stream import RequestStream
from pelton.serving.router.types import Policy, RouterConfig, RouteRequest
from pelton.serving.worker_client import WorkerClient
from pelton.serving.worker_pool import WorkerPool


def make_request(name: str, num_tokens: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4)
    return GenerateRequest(
        request_id=name, prompt_token_ids=[1] * num_tokens, sampling=sampling, seed=1
    )


async def make_pool(policy: Policy) -> tuple[WorkerPool, list[InMemoryTransport]]:
    pool = WorkerPool([Role.MIXED] * 2, RouterConfig(policy=policy, report_delay_s=0.0))
    transports = [InMemoryTransport(make_engine(f"?max_model_len={n}")) for n in (64, 32)]
    for index, transport in enumerate(transports):
        pool.roster.use(index, await WorkerClient.over(transport), 1)
    return pool, transports


@asynccontextmanager
async def placed(
    pool: WorkerPool, name: str, num_tokens: int = 3
) -> AsyncIterator[tuple[RequestStream, str]]:
    with pool.place([make_request(name, num_tokens)]) as placement:
        await placement.start()
        assert placement.decision is not None
        yield placement.stream, placement.decision.worker_id


async def take_one(pool: WorkerPool, name: str, num_tokens: int = 3) -> str:
    async with placed(pool, name, num_tokens) as (_, worker_id):
        return worker_id


async def test_each_in_turn() -> None:
    pool, _ = await make_pool(Policy.ROUND_ROBIN)
    assert [await take_one(pool, str(i)) for i in range(4)] == ["0", "1", "0", "1"]
    assert [state.num_routed for state in pool.roster.states.values()] == [2, 2]


async def test_load_counts_until_the_reply_ends() -> None:
    pool, _ = await make_pool(Policy.LEAST_LOADED)
    async with placed(pool, "a") as (_, worker_id):
        others = {await take_one(pool, str(i)) for i in range(8)}
    assert others == {"0", "1"} - {worker_id}
    assert {await take_one(pool, f"later {i}") for i in range(32)} == {"0", "1"}


async def test_a_prompt_counts_until_its_first_token() -> None:
    pool, transports = await make_pool(Policy.INPUT_LENGTH)
    async with placed(pool, "long", 20) as (_, worker_id):
        others = {await take_one(pool, str(i)) for i in range(8)}
        assert others == {"0", "1"} - {worker_id}
        transports[int(worker_id)].worker.step()
        async with placed(pool, "short"):
            assert await take_one(pool, "later") == worker_id


async def test_lost_worker_takes_nothing_and_fails_only_its_own() -> None:
    pool, transports = await make_pool(Policy.ROUND_ROBIN)
    async with placed(pool, "a") as (lost, _), placed(pool, "b") as (kept, _):
        transports[0].lose()
        assert {await take_one(pool, str(i)) for i in range(3)} == {"1"}
        with pytest.raises(WorkerLostError):
            await anext(lost)
        transports[1].worker.step()
        assert await anext(kept)
    assert pool.roster.num_up == 1
    pool.roster.use(0, None, 1)
    pool.roster.use(0, await WorkerClient.over(InMemoryTransport(make_engine())), 2)
    assert {await take_one(pool, f"again {i}") for i in range(2)} == {"0", "1"}


async def test_quiet_worker_is_passed_over_unless_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = await make_pool(Policy.ROUND_ROBIN)
    first = pool.roster.states[0].client
    monkeypatch.setattr(WorkerClient, "is_quiet", property(lambda client: client is first))
    assert {await take_one(pool, str(i)) for i in range(3)} == {"1"}
    monkeypatch.setattr(WorkerClient, "is_quiet", True)
    assert {await take_one(pool, f"all {i}") for i in range(3)} == {"0", "1"}


async def test_without_workers_nothing_is_taken() -> None:
    pool, transports = await make_pool(Policy.RANDOM)
    assert pool.roster.info is not None
    assert pool.roster.info.max_model_len == 32
    for transport in transports:
        transport.lose()
    assert pool.roster.info is None
    with pytest.raises(UnavailableError, match="being loaded"):
        await take_one(pool, "a")


# Requests that outlive their worker


async def make_lasting_pool(
    num_workers: int = 3, max_losses: int = 2
) -> tuple[WorkerPool, list[InMemoryTransport]]:
    pool = WorkerPool(
        [Role.MIXED] * max(num_workers, 2),  # a second one that never came up
        RouterConfig(policy=Policy.LEAST_LOADED, report_delay_s=0.0),
        max_losses,
    )
    transports = [InMemoryTransport(make_engine()) for _ in range(num_workers)]
    for index, transport in enumerate(transports):
        pool.roster.use(index, await WorkerClient.over(transport), 1)
    return pool, transports


def make_long(name: str = "r", **sampling: int) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 9, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(request_id=name, prompt_token_ids=[1] * 5, sampling=params, seed=3)


def expected_outputs(request: GenerateRequest) -> list[list[int]]:
    engine = make_engine()
    engine.add(request)
    tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
    while engine.has_work:
        for output in engine.step():
            tokens[output.index] += output.token_ids
    return tokens


def carrier_of(pool: WorkerPool, transports: list[InMemoryTransport]) -> InMemoryTransport:
    (busy,) = [t for t in transports if t.is_connected and t.worker.has_work]
    return busy


def lose(pool: WorkerPool, transports: list[InMemoryTransport]) -> None:
    """The only busy worker dies, and the frontend hears of it."""
    busy = carrier_of(pool, transports)
    busy.is_connected = False
    busy.lose()
    pool.roster.use(transports.index(busy), None, 1)


def assert_idle(pool: WorkerPool) -> None:
    assert all(
        pool._router.booked_on(str(i)).is_zero() for i, s in pool.roster.states.items() if s.is_up
    )
    assert pool.gate.num_waiting == 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def run_to_end(transports: list[InMemoryTransport]) -> None:
    await settle()
    while any(t.is_connected and t.worker.has_work for t in transports):
        for transport in transports:
            if transport.is_connected and transport.worker.has_work:
                transport.worker.step()
        await settle()


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("steps_before", [(0,), (1,), (8,), (2, 3)], ids=str)
async def test_a_request_goes_on_where_its_worker_was_lost(
    num_choices: int, steps_before: tuple[int, ...]
) -> None:
    pool, transports = await make_lasting_pool()
    request = make_long(n=num_choices)
    with pool.place([request]) as placement:
        await placement.start()
        for num_steps in steps_before:
            for _ in range(num_steps):
                carrier_of(pool, transports).worker.step()
            lose(pool, transports)
            await settle()
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    tokens: list[list[int]] = [[] for _ in range(num_choices)]
    for output in outputs:
        tokens[output.index] += output.token_ids
    assert tokens == expected_outputs(request)
    assert pool.num_migrated == len(steps_before)
    assert_idle(pool)


async def test_a_choice_that_was_stopped_does_not_run_again() -> None:
    pool, transports = await make_lasting_pool()
    with pool.place([make_long(n=2)]) as placement:
        await placement.start()
        carrier_of(pool, transports).worker.step()
        await anext(placement.stream)
        placement.stream.cancel_choice("r", 0)
        lose(pool, transports)
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    assert {output.index for output in outputs} == {1}
    assert sum(len(output.token_ids) for output in outputs) == 8


async def test_requests_of_one_reply_move_each_by_itself() -> None:
    pool, transports = await make_lasting_pool()
    requests = [make_long("a"), make_long("b")]
    with pool.place(requests) as placement:
        await placement.start()
        await settle()
        busy = [t for t in transports if t.worker.has_work]
        assert len(busy) == 2
        for transport in busy:
            transport.worker.step()
        busy[0].is_connected = False
        busy[0].lose()
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    for request in requests:
        tokens = [t for o in outputs if o.request_id == request.request_id for t in o.token_ids]
        assert [tokens] == expected_outputs(request)
    assert pool.num_migrated == 1


def make_many(count: int) -> list[GenerateRequest]:
    return [make_long(f"r{i}") for i in range(count)]


async def test_a_reply_is_read_while_the_rest_of_it_waits_for_room() -> None:
    pool, transports = await make_lasting_pool(num_workers=1)
    capacity = 2 * transports[0].worker._info.max_num_requests
    with pool.place(make_many(capacity + 1)) as placement:
        await asyncio.wait_for(placement.start(), 20)
        await settle()
        transports[0].worker.step()
        assert len(await anext(placement.stream)) > 0
        assert pool.gate.num_waiting == 1
    await settle()
    assert_idle(pool)


async def test_what_is_left_of_a_reply_waits_for_a_worker_as_what_was_sent_does() -> None:
    pool, transports = await make_lasting_pool(num_workers=1)
    requests = make_many(2 * transports[0].worker._info.max_num_requests + 1)
    with pool.place(requests) as placement:
        await placement.start()
        await settle()
        lose(pool, transports)
        await settle()
        transports.append(InMemoryTransport(make_engine()))
        pool.roster.use(0, await WorkerClient.over(transports[-1]), 2)
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    assert len({o.request_id for o in outputs if o.finish_reason is not None}) == len(requests)
    assert_idle(pool)


async def test_a_fault_in_placing_a_later_request_ends_the_reply_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _ = await make_lasting_pool()
    book = pool.book

    async def book_or_fail(
        request: GenerateRequest, route: RouteRequest, *, has_begun: bool
    ) -> object:
        if request.request_id == "b":
            raise KeyError("a mistake")
        return await book(request, route, has_begun=has_begun)

    monkeypatch.setattr(pool, "book", book_or_fail)
    with pool.place([make_long("a"), make_long("b")]) as placement:
        await placement.start()
        with pytest.raises(PeltonError, match="the log says why"):
            await asyncio.wait_for(placement.stream.collect(), 5)
    await settle()
    assert "a mistake" in caplog.text
    assert_idle(pool)


async def test_what_keeps_a_later_request_of_a_reply_from_starting_ends_the_reply() -> None:
    pool, transports = await make_lasting_pool(num_workers=1, max_losses=0)
    requests = make_many(2 * transports[0].worker._info.max_num_requests + 1)
    with pool.place(requests) as placement:
        await placement.start()
        await settle()
        pool.gate.close(UnavailableError("It broke."))
        with pytest.raises(UnavailableError, match="It broke"):
            await asyncio.wait_for(placement.stream.collect(), 20)
    assert_idle(pool)


async def test_who_loses_too_many_workers_fails() -> None:
    pool, transports = await make_lasting_pool(max_losses=1)
    with pool.place([make_long()]) as placement:
        await placement.start()
        for _ in range(2):
            lose(pool, transports)
            await settle()
        with pytest.raises(WorkerLostError):
            await placement.stream.collect()
    assert_idle(pool)


async def test_without_another_worker_it_waits_for_one() -> None:
    pool, transports = await make_lasting_pool(2)
    pool.roster.use(1, None, 1)
    request = make_long()
    with pool.place([request]) as placement:
        await placement.start()
        transports[0].worker.step()
        lose(pool, transports)
        await settle()
        assert not placement.stream.is_done
        back = InMemoryTransport(make_engine())
        pool.roster.use(1, await WorkerClient.over(back), 2)
        await run_to_end([back])
        outputs = await placement.stream.collect()
    assert [[t for o in outputs for t in o.token_ids]] == expected_outputs(request)


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    pool, transports = await make_lasting_pool(2)
    pool.roster.use(1, None, 1)
    with pool.place([make_long()]) as placement:
        await placement.start()
        lose(pool, transports)
        await settle()
        placement.stream.cancel()
    await settle()
    back = InMemoryTransport(make_engine())
    pool.roster.use(0, await WorkerClient.over(back), 2)
    await settle()
    assert not back.worker.has_work
    assert_idle(pool)


@pytest.mark.parametrize("has_room", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_hashed_joins_no_queue(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, transports = await make_lasting_pool(num_workers=1)
    capacity = 2 * transports[0].worker._info.max_num_requests
    hashed = asyncio.Event()
    with pool.place(make_many(1 if has_room else capacity)) as others:
        await others.start()
        await settle()

        async def hash_slowly(*prompt: object) -> list[bytes]:
            await hashed.wait()
            return []

        monkeypatch.setattr(pool, "_hash", hash_slowly)
        with pool.place([make_long("late")]) as placement:
            starting = asyncio.create_task(placement.start())
            await settle()
            placement.stream.cancel()
            hashed.set()
            await asyncio.wait_for(starting, 5)
        assert pool.gate.num_waiting == 0
        assert pool._router.booked_on("0").requests == (1 if has_room else capacity)
    assert_idle(pool)


async def test_a_migrated_request_is_not_displaced_by_a_newcomer() -> None:
    pool, transports = await make_lasting_pool(2)
    pool.roster.use(1, None, 1)
    with pool.place([replace(make_long(), priority=5)]) as placement:
        await placement.start()
        transports[0].worker.step()
        lose(pool, transports)
        await settle()
        assert pool.gate.num_waiting == 1
        assert not pool.gate.has_lower(0)
    await settle()
    assert_idle(pool)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_worker_that_dies_with_a_booking_on_its_way_is_a_loss(is_replaced: bool) -> None:
    pool, transports = await make_lasting_pool(2)
    pool.roster.use(1, None, 1)
    pool.roster.states[0].client, client = None, pool.roster.states[0].client
    with pool.place([make_long()]) as placement:
        starting = asyncio.create_task(placement._migrate("r"))
        await settle()
        assert pool.gate.num_waiting == 1
        pool.roster.states[0].client = client
        pool.gate.pump()  # booked, and before it is sent:
        transports[0].is_connected = False
        transports[0].lose()
        pool.roster.use(0, None, 1)
        await starting
        await settle()
        if is_replaced:
            back = InMemoryTransport(make_engine())
            pool.roster.use(0, await WorkerClient.over(back), 2)
            await run_to_end([back])
            outputs = await placement.stream.collect()
            assert [[t for o in outputs for t in o.token_ids]] == expected_outputs(make_long())
    assert_idle(pool)


async def test_sessions_stay_on_their_worker_and_tenants_apart() -> None:
    pool, _ = await make_lasting_pool()

    async def worker_for(session: str, cache_salt: str = "") -> str:
        request = replace(make_long(), cache_salt=cache_salt)
        with pool.place([request], session) as placement:
            await placement.start()
        assert placement.decision is not None
        return placement.decision.worker_id

    homes = {str(i): await worker_for(str(i)) for i in range(12)}
    assert set(homes.values()) == {"0", "1", "2"}
    for session, home in homes.items():
        assert await worker_for(session) == home
    assert "session of worker" in pool.recent[-1].header
    await worker_for("0", "tenant")
    assert "session of worker" not in pool.recent[-1].header


@pytest.mark.parametrize(
    ("num_workers", "policy", "cached"),
    [(2, Policy.KV_AWARE, 0), (1, Policy.KV_AWARE, None), (2, Policy.RANDOM, None)],
)
async def test_a_route_says_what_is_cached_only_where_that_is_followed(
    num_workers: int, policy: Policy, cached: int | None
) -> None:
    pool = WorkerPool([Role.MIXED] * num_workers, RouterConfig(policy=policy))
    for index in range(num_workers):
        pool.roster.use(index, await WorkerClient.over(InMemoryTransport(make_engine())), 1)
    await take_one(pool, "a", 40)
    decision = pool.recent[-1]
    assert decision.cached_tokens == cached
    assert ("cached=" in decision.header) == (cached is not None)
    known = "40 tokens of prompt" if cached is None else "40 of 40 tokens to prefill"
    assert f": {known} behind 0" in decision.header


# Workers that are to end


async def test_a_drained_worker_keeps_what_it_has_and_gets_nothing_new() -> None:
    pool, transports = await make_lasting_pool(num_workers=2)
    with pool.place([make_long()]) as placement:
        await placement.start()
        number = transports.index(carrier_of(pool, transports))
        pool.roster.drain(number)
        assert {await take_one(pool, str(i)) for i in range(4)} == {str(1 - number)}
        assert pool.roster.num_booked(number) == 1
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    assert [t for o in outputs for t in o.token_ids] == expected_outputs(make_long())[0]
    assert pool.num_migrated == 0
    assert pool.roster.num_booked(number) == 0


async def test_a_request_survives_more_drained_workers_than_it_may_lose() -> None:
    pool, transports = await make_lasting_pool(num_workers=3, max_losses=1)
    with pool.place([make_long()]) as placement:
        await placement.start()
        for generation in range(2, 6):
            busy = carrier_of(pool, transports)
            number = transports.index(busy)
            busy.worker.step()
            pool.roster.drain(number)
            pool.roster.hand_over(number)
            await settle()
            assert not busy.worker.has_work
            assert pool.roster.num_booked(number) == 0
            pool.roster.use(number, await WorkerClient.over(busy), generation)
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    assert [t for o in outputs for t in o.token_ids] == expected_outputs(make_long())[0]
    assert pool.num_migrated == 4
    assert_idle(pool)


async def test_a_request_that_cannot_move_stays_on_the_worker_that_drains() -> None:
    pool, transports = await make_lasting_pool(num_workers=2, max_losses=0)
    with pool.place([make_long()]) as placement:
        await placement.start()
        number = transports.index(carrier_of(pool, transports))
        pool.roster.drain(number)
        pool.roster.hand_over(number)
        await run_to_end(transports)
        outputs = await placement.stream.collect()
    assert [t for o in outputs for t in o.token_ids] == expected_outputs(make_long())[0]


async def test_workers_come_and_go() -> None:
    pool, _ = await make_lasting_pool(num_workers=2)
    pool.roster.use(5, await WorkerClient.over(InMemoryTransport(make_engine())), 1)
    async with placed(pool, "a"), placed(pool, "b"):
        assert await take_one(pool, "c") not in {"a", "b"}
    pool.roster.use(0, None, 1)
    pool.roster.remove(0)
    assert sorted(pool.roster.states) == [1, 5]
    assert {await take_one(pool, str(i)) for i in range(16)} == {"1", "5"}
