# SPDX-License-Identifier: Apache-2.0
"""What an engine caches becomes events, and the frontend's router knows it."""

from itertools import count

import pytest
from in_memory import InMemoryTransport

from pelton.core.block_hash import hash_prompt, make_request_salt
from pelton.core.config import CacheConfig, EngineConfig, ModelConfig, Role
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.serving import messages
from pelton.serving.cache_events import CachePublisher
from pelton.serving.router.events import CacheDump, CacheEvent, EventKind
from pelton.serving.router.types import Policy, RouterConfig
from pelton.serving.stand_in import make_scheduled_stand_in, make_stand_in, parse_stand_in
from pelton.serving.worker_client import WorkerClient
from pelton.serving.worker_pool import WorkerPool

BLOCK_SIZE = 4
NAME = "stand-in:none?scheduled=1&max_model_len=64&max_num_requests=4&num_blocks={}"
_numbers = count()


def make_engine(num_blocks: int = 64, *, prefix_cache: bool = True) -> Engine:
    name = NAME.format(num_blocks)
    cache = CacheConfig(block_size=BLOCK_SIZE, prefix_cache=prefix_cache)
    config = EngineConfig(model=ModelConfig(model=name), cache=cache)
    return make_scheduled_stand_in(config, parse_stand_in(name))


def make_request(prompt: list[int], cache_salt: str = "", max_tokens: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(next(_numbers)),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        seed=1,
        cache_salt=cache_salt,
    )


def run(engine: Engine, prompt: list[int], max_tokens: int = 1) -> None:
    engine.add(make_request(prompt, max_tokens=max_tokens))
    while engine.has_work:
        engine.step()


def make_prompt(number: int, num_tokens: int = 17) -> list[int]:
    return [number + 1] * num_tokens


def hashes_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    salt = make_request_salt(engine.config.model.model, "")
    return hash_prompt(prompt, BLOCK_SIZE, salt)


def apply(found: set[bytes], events: list[CacheEvent]) -> set[bytes]:
    for event in events:
        if event.kind is EventKind.STORED:
            found = found | set(event.hashes)
        else:
            assert event.kind is EventKind.REMOVED
            assert set(event.hashes) <= found
            found = found - set(event.hashes)
    return found


def test_events_tell_what_can_be_found_also_after_evictions() -> None:
    engine, found = make_engine(num_blocks=20), set[bytes]()
    publisher = CachePublisher(engine)
    publisher.subscribe(b"router")
    numbers = []
    for number in range(12):
        run(engine, make_prompt(number), max_tokens=9)
        events = publisher.take()
        numbers += [event.sequence for event in events]
        found = apply(found, events)
    pool = engine._scheduler._running.tables.pools[0]
    assert found == set(pool._block_of)
    assert numbers == list(range(publisher.next_sequence))
    newest, oldest = hashes_of(engine, make_prompt(11)), hashes_of(engine, make_prompt(0))
    assert set(newest) <= found
    assert not found & set(oldest)


def test_what_was_cached_before_the_first_router_is_its_first_event() -> None:
    engine = make_engine()
    run(engine, make_prompt(0))
    publisher = CachePublisher(engine)
    assert publisher.take() == []
    publisher.subscribe(b"router")
    (event,) = publisher.take()
    assert event == CacheEvent(0, EventKind.STORED, tuple(hashes_of(engine, make_prompt(0))))


def test_nothing_is_noted_while_nobody_listens() -> None:
    engine = make_engine()
    run(engine, make_prompt(0))
    assert engine._scheduler._running.tables.pools[0]._changes is None


def test_an_engine_that_shares_nothing_has_no_events() -> None:
    engine = make_engine(prefix_cache=False)
    publisher = CachePublisher(engine)
    publisher.subscribe(b"router")
    run(engine, make_prompt(0))
    assert publisher.take() == []


def test_events_and_dumps_survive_the_wire() -> None:
    event = CacheEvent(7, EventKind.REMOVED, (b"a" * 16, b"b" * 16))
    dump = CacheDump(8, (b"c" * 16,))
    for message in (messages.CacheEvents([event]), messages.CacheContents(dump)):
        assert messages.decode_from_worker(messages.encode(message)) == message


class LossyTransport(InMemoryTransport):
    """Loses cache events while told to."""

    is_losing = False

    def _to_client(self, client: bytes, payload: bytes) -> bool:
        is_events = isinstance(messages.decode_from_worker(payload), messages.CacheEvents)
        return (self.is_losing and is_events) or super()._to_client(client, payload)


async def make_pool(
    num_workers: int = 3, **options: bool
) -> tuple[WorkerPool, list[LossyTransport], list[Engine]]:
    pool = WorkerPool(
        [Role.MIXED] * num_workers, RouterConfig(policy=Policy.KV_AWARE, report_delay_s=0.0)
    )
    engines = [make_engine(**options) for _ in range(num_workers)]
    transports = [LossyTransport(engine) for engine in engines]
    for index, transport in enumerate(transports):
        client = await WorkerClient.over(transport)
        pool.roster.use(index, client, 1)
    return pool, transports, engines


async def worker_for(
    pool: WorkerPool, prompt: list[int], cache_salt: str = "", session: str = ""
) -> str:
    with pool.place([make_request(prompt, cache_salt)], session) as placement:
        await placement.start()
    assert placement.decision is not None
    return placement.decision.worker_id


def forget_decisions(pool: WorkerPool) -> None:
    pool._router._decisions._new.clear()
    pool._router._decisions._old.clear()


async def test_a_prompt_goes_to_the_worker_that_has_it() -> None:
    pool, transports, engines = await make_pool()
    for number, engine in enumerate(engines):
        run(engine, make_prompt(number, 33))
    for transport in transports:
        transport.worker.heartbeat()
    assert [state.num_indexed_blocks for state in pool.roster.states.values()] == [8, 8, 8]
    for number in (2, 0, 1, 1, 2, 0):
        assert await worker_for(pool, make_prompt(number, 40)) == str(number)
        forget_decisions(pool)


async def test_another_tenant_finds_nothing() -> None:
    pool, transports, engines = await make_pool()
    run(engines[1], make_prompt(0, 33))
    transports[1].worker.heartbeat()
    workers = set()
    for number in range(30):
        workers.add(await worker_for(pool, make_prompt(0, 33), cache_salt=f"tenant {number}"))
    assert workers == {"0", "1", "2"}


@pytest.mark.parametrize("num_lost", [1, 3])
async def test_lost_events_are_asked_for_again(num_lost: int) -> None:
    pool, transports, engines = await make_pool()
    transports[0].is_losing = True
    for number in range(num_lost):
        run(engines[0], make_prompt(number))
        transports[0].worker.heartbeat()
    assert pool.roster.states[0].num_indexed_blocks == 0
    transports[0].is_losing = False
    pool._router._index._replay_timeout_s = 0.0
    run(engines[0], make_prompt(9))
    transports[0].worker.heartbeat()
    assert pool.roster.states[0].num_indexed_blocks == 4 * (num_lost + 1)


async def test_a_frontend_that_comes_late_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    _, transports, engines = await make_pool(2)
    for number in range(5):
        run(engines[0], make_prompt(number))
        transports[0].worker.heartbeat()
    transports[0].worker._cache._log._events.clear()  # too old to be replayed one by one
    late = WorkerPool([Role.MIXED] * 2, RouterConfig(policy=Policy.KV_AWARE, report_delay_s=0.0))
    late.roster.use(0, await WorkerClient.over(transports[0]), 1)
    transports[0].worker.heartbeat()
    assert late.roster.states[0].num_indexed_blocks == 20


async def test_a_replaced_worker_starts_with_nothing() -> None:
    pool, transports, engines = await make_pool(2)
    run(engines[0], make_prompt(0))
    transports[0].worker.heartbeat()
    old = pool.roster.states[0].client
    assert old is not None
    pool.roster.use(0, None, 1)
    assert pool.roster.states[0].num_indexed_blocks == 0
    transport = LossyTransport(make_engine())
    pool.roster.use(0, await WorkerClient.over(transport), 2)
    run(engines[0], make_prompt(1))
    transports[0].worker.heartbeat()  # from the old process, late
    assert pool.roster.states[0].num_indexed_blocks == 0


async def test_reports_carry_load_and_rates() -> None:
    pool, transports, engines = await make_pool(2)
    engines[0].add(make_request(make_prompt(0, 30)))
    transports[0].worker.heartbeat()
    load = pool._router.load_of("0")
    assert (load.requests, load.prefill_tokens, load.blocks) == (1, 30, 0)
    engines[0].step()
    transports[0].worker.heartbeat()
    assert pool._router.load_of("0").prefill_tokens == 0
    while engines[0].has_work:
        engines[0].step()
    transports[0].worker.heartbeat()
    assert pool._router.load_of("0").is_zero()


async def test_workers_without_prefix_cache_are_balanced() -> None:
    pool, _, _ = await make_pool(prefix_cache=False)
    assert {await worker_for(pool, make_prompt(0)) for _ in range(30)} == {"0", "1", "2"}


def test_one_worker_needs_no_events() -> None:
    assert not WorkerPool(
        [Role.MIXED] * 1, RouterConfig(policy=Policy.KV_AWARE, report_delay_s=0.0)
    ).roster.is_kv_aware
    config = EngineConfig(model=ModelConfig(model="stand-in:none"))
    assert make_stand_in(config).watch_cache() is None


async def test_the_first_workers_cache_is_known_once_there_is_a_second() -> None:
    pool = WorkerPool([Role.MIXED], RouterConfig(policy=Policy.KV_AWARE, report_delay_s=0.0))
    engines = [make_engine(), make_engine()]
    transports = [InMemoryTransport(engine) for engine in engines]
    run(engines[0], make_prompt(3))
    pool.roster.use(0, await WorkerClient.over(transports[0]), 1)
    transports[0].worker.heartbeat()
    assert pool.roster.states[0].num_indexed_blocks == 0
    pool.roster.use(1, await WorkerClient.over(transports[1]), 1)
    transports[0].worker.heartbeat()
    assert pool.roster.states[0].num_indexed_blocks == 4
    assert await worker_for(pool, make_prompt(3)) == "0"
