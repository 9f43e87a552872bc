# SPDX-License-Identifier: Apache-2.0
"""The prefix index follows the workers' caches through loss, reordering and restarts."""

from hypothesis import given
from hypothesis import strategies as st
from router_harness import distinct_prompt, make_hashes, removed, stored

from pelton.serving.router.events import (
    CacheDump,
    CacheEvent,
    EventKind,
    EventLog,
    ReplayRequest,
)
from pelton.serving.router.prefix_index import PrefixIndex

HASHES = make_hashes(range(160))


class ModelWorker:
    """A cache as a plain set, with the log that publishes it."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.cache: set[bytes] = set()
        self.log = EventLog(max_events=6)

    def act(self, kind: EventKind, first: int, num: int) -> CacheEvent:
        hashes = HASHES[first : first + num]
        if kind is EventKind.STORED:
            self.cache |= set(hashes)
        else:
            self.cache -= set(hashes)
        return self.log.record(kind, hashes)


def answer(index: PrefixIndex, worker: ModelWorker, wanted: ReplayRequest, now_s: float) -> None:
    reply = worker.log.replay(wanted.from_sequence)
    if isinstance(reply, CacheDump):
        index.load_dump("w", wanted.generation, reply)
    else:
        assert index.apply("w", wanted.generation, reply, now_s) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "drop", "late", "again", "lose reply", "restart"]),
            st.sampled_from(EventKind),
            st.integers(0, 9),
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_index_agrees_with_a_plain_set(actions: list[tuple[str, EventKind, int, int]]) -> None:
    index, worker, now_s = PrefixIndex(), ModelWorker(0), 0.0
    index.add_worker("w", 0)
    held_back: list[tuple[int, CacheEvent]] = []
    for action, kind, first, num in actions:
        now_s += 2.0
        if action == "restart":
            worker = ModelWorker(worker.generation + 1)
            index.add_worker("w", worker.generation)
            continue
        event = worker.act(kind, first, num)
        if action == "drop":
            continue
        if action == "late":
            held_back.append((worker.generation, event))
            continue
        wanted = index.apply("w", worker.generation, [event] * (1 + (action == "again")), now_s)
        if wanted is not None and action != "lose reply":
            answer(index, worker, wanted, now_s)
            assert index._workers["w"].hashes == worker.cache
    for generation, event in held_back:
        index.apply("w", generation, [event], now_s)
    now_s += 2.0
    wanted = index.expect(
        "w", worker.generation, worker.log.record(EventKind.STORED, []).sequence, 9e9
    )
    if wanted is not None:
        answer(index, worker, wanted, now_s)
    assert index._workers["w"].hashes == worker.cache


@given(st.integers(0, 40), st.lists(st.sampled_from([0, 1, 10, 11, 11, 11, 12, 40]), max_size=8))
def test_depth_is_the_length_of_each_workers_cached_prefix(
    num_blocks: int, cached: list[int]
) -> None:
    hashes = make_hashes(range(40 * 16))
    index = PrefixIndex()
    for number, num_cached in enumerate(cached):
        index.add_worker(str(number), 0)
        index.apply(str(number), 0, [stored(0, hashes[:num_cached])], 0.0)
    prompt = hashes[:num_blocks]
    expected = {str(number): min(num, num_blocks) for number, num in enumerate(cached)}
    depths = index.depths(prompt)
    assert depths == {worker_id: depth for worker_id, depth in expected.items() if depth}
    assert all(index.verify(i, prompt, depth) == depth for i, depth in depths.items())


def test_a_gap_is_asked_for_once_and_again_when_the_replay_does_not_come() -> None:
    index = PrefixIndex(replay_timeout_s=1.0)
    index.add_worker("w", 3)
    assert index.apply("w", 3, [stored(0, HASHES[:1])], 0.0) is None
    assert index.apply("w", 3, [stored(2, HASHES[2:3])], 0.0) == ReplayRequest("w", 3, 1)
    assert index.apply("w", 3, [stored(3, HASHES[3:4])], 0.9) is None
    assert index.apply("w", 3, [stored(4, HASHES[4:5])], 1.0) == ReplayRequest("w", 3, 1)
    index.apply("w", 3, [stored(n, HASHES[n : n + 1]) for n in range(1, 5)], 1.1)
    assert index.depths(HASHES).get("w", 0) == 5
    assert index.apply("w", 3, [stored(6, HASHES[6:7])], 1.1) == ReplayRequest("w", 3, 5)


def test_a_lost_last_event_shows_in_the_next_heartbeat() -> None:
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, HASHES[:1])], 0.0)
    assert index.expect("w", 0, 1, 0.0) is None
    assert index.expect("w", 0, 2, 0.0) == ReplayRequest("w", 0, 1)


def test_first_contact_with_a_worker_that_has_run_for_long_is_a_dump() -> None:
    log = EventLog(max_events=2)
    for block_hash in HASHES[:5]:
        event = log.record(EventKind.STORED, [block_hash])
    index = PrefixIndex()
    index.add_worker("w", 0)
    wanted = index.apply("w", 0, [event], 0.0)
    assert wanted == ReplayRequest("w", 0, 0)
    dump = log.replay(wanted.from_sequence)
    assert isinstance(dump, CacheDump)
    index.load_dump("w", 0, dump)
    assert index.depths(HASHES).get("w", 0) == 5
    assert index.apply("w", 0, [log.record(EventKind.REMOVED, HASHES[4:5])], 0.0) is None
    assert index.depths(HASHES).get("w", 0) == 4


def test_blocks_of_an_earlier_generation_vanish_at_once_and_its_events_are_ignored() -> None:
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, HASHES)], 0.0)
    index.add_worker("w", 1)
    assert index.depths(HASHES).get("w", 0) == 0
    assert index.apply("w", 0, [stored(1, HASHES)], 0.0) is None
    index.load_dump("w", 0, CacheDump(9, tuple(HASHES)))
    assert index.num_blocks("w") == 0
    index.add_worker("w", 0)
    assert index.apply("w", 1, [stored(0, HASHES[:2])], 0.0) is None
    assert index.depths(HASHES).get("w", 0) == 2


def test_a_removed_worker_has_nothing() -> None:
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, HASHES)], 0.0)
    index.remove_worker("w")
    assert index.depths(HASHES).get("w", 0) == 0
    assert index.apply("w", 0, [stored(1, HASHES)], 0.0) is None


def test_an_old_dump_does_not_undo_newer_events() -> None:
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, HASHES[:4]), removed(1, HASHES[3:4])], 0.0)
    index.load_dump("w", 0, CacheDump(1, tuple(HASHES[:4])))
    assert index.depths(HASHES).get("w", 0) == 3


@given(st.integers(256, 1000), st.data())
def test_verify_finds_holes_longer_than_its_stride(num_blocks: int, data: st.DataObject) -> None:
    hashes = make_hashes(distinct_prompt(0, num_blocks * 16))
    stride = -(-num_blocks // 64)
    start = data.draw(st.integers(0, num_blocks - stride))
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, hashes), removed(1, hashes[start : start + stride])], 0.0)
    assert index.verify("w", hashes, num_blocks) == start
