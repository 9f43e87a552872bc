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


def blocks_of(index: PrefixIndex, worker_id: str) -> set[bytes]:
    """What the index says that the worker has: a prompt of one block is that block."""
    found = {block_hash for block_hash in HASHES if worker_id in index.depths([block_hash])}
    assert index.num_blocks(worker_id) == len(found)
    return found


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
            assert blocks_of(index, "w") == worker.cache
    for generation, event in held_back:
        index.apply("w", generation, [event], now_s)
    now_s += 2.0
    wanted = index.expect(
        "w", worker.generation, worker.log.record(EventKind.STORED, []).sequence, 9e9
    )
    if wanted is not None:
        answer(index, worker, wanted, now_s)
    assert blocks_of(index, "w") == worker.cache


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "dump", "restart", "leave"]),
            st.sampled_from("abc"),
            st.integers(0, 9),
            st.integers(1, 5),
        ),
        max_size=80,
    )
)
def test_workers_that_share_blocks_come_and_go(
    actions: list[tuple[str, str, int, int]],
) -> None:
    """Each as a plain set, whatever becomes of the others; nothing of who left stays for long."""
    index, caches, places = PrefixIndex(), {}, {}
    for action, name, first, num in actions:
        hashes = HASHES[first : first + num]
        if action == "leave":
            caches.pop(name, None)
            index.remove_worker(name)
        elif action == "restart" or name not in caches:
            generation = places[name][0] + 1 if name in places else 0
            places[name], caches[name] = (generation, 0), set()
            index.add_worker(name, generation)
        else:
            generation, sequence = places[name]
            if action == "dump":
                caches[name] = set(hashes)
                index.load_dump(name, generation, CacheDump(sequence + 3, tuple(hashes)))
                sequence += 2
            elif action == "store":
                caches[name] |= set(hashes)
                assert index.apply(name, generation, [stored(sequence, hashes)], 0.0) is None
            else:
                caches[name] -= set(hashes)
                assert index.apply(name, generation, [removed(sequence, hashes)], 0.0) is None
            places[name] = generation, sequence + 1
        for name in "abc":
            assert blocks_of(index, name) == caches.get(name, set())
    for _ in range(600):  # messages
        index.expect("a", 0, 0, 0.0)
    table = {block: mask for part in index._parts for block, mask in part.items()}
    assert set(table) == set().union(*caches.values())
    assert index._gone == 0
    assert all(mask & index._known == mask for mask in table.values())


@given(st.integers(0, 32), st.lists(st.sampled_from([0, 1, 10, 11, 11, 11, 12, 40]), max_size=8))
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
    assert index.depths(prompt) == {i: depth for i, depth in expected.items() if depth}


@given(st.integers(33, 700), st.lists(st.integers(0, 700), min_size=1, max_size=8))
def test_of_a_long_prompt_the_deepest_is_exact_and_others_are_rounded_down(
    num_blocks: int, cached: list[int]
) -> None:
    hashes = make_hashes(range(700 * 16))
    index = PrefixIndex()
    for number, num_cached in enumerate(cached):
        index.add_worker(str(number), 0)
        index.apply(str(number), 0, [stored(0, hashes[:num_cached])], 0.0)
    stride = -(-num_blocks // 32)
    exact = {str(number): min(num, num_blocks) for number, num in enumerate(cached)}

    depths = index.depths(hashes[:num_blocks])

    assert set(depths) == {worker for worker, depth in exact.items() if depth}
    for worker, depth in depths.items():
        assert exact[worker] - stride < depth <= exact[worker]
        if exact[worker] == max(exact.values()):
            assert depth == exact[worker]


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


def test_the_log_forgets_the_oldest_of_long_events_too() -> None:
    log = EventLog(max_hashes=5)
    events = [log.record(EventKind.STORED, HASHES[2 * n : 2 * n + 2]) for n in range(4)]
    assert log.replay(2) == events[2:]
    assert isinstance(log.replay(1), CacheDump)
    log.record(EventKind.STORED, HASHES[4:])  # longer than the log
    assert log.replay(5) == []
    dump = log.replay(4)
    assert isinstance(dump, CacheDump)
    assert dump.next_sequence == 5
    assert set(dump.hashes) == set(HASHES)


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


@given(st.integers(2, 1000), st.data())
def test_a_hole_longer_than_the_stride_is_found(num_blocks: int, data: st.DataObject) -> None:
    hashes = make_hashes(distinct_prompt(0, num_blocks * 16))
    stride = -(-num_blocks // 32)
    start = data.draw(st.integers(1, num_blocks - min(stride, num_blocks - 1)))
    index = PrefixIndex()
    index.add_worker("w", 0)
    index.apply("w", 0, [stored(0, hashes), removed(1, hashes[start : start + stride])], 0.0)
    assert index.depths(hashes) == {"w": start}
