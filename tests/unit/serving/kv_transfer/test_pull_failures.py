# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong with KV on its way: the right tokens, and nothing held for ever."""

import gc
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kv_cases import (
    join,
    make_engine_of,
    make_request,
    pair_of,
    prefill_only,
    run_alone,
    run_pair,
)
from kv_pair import Pair, assert_all_is_given_back
from pelton.core.clock import ManualClock
from pelton.core.config import Role
from pelton.core.errors import InvalidRequestError
from pelton.core.kv_transfer import KVLayout, PullResult, explain_mismatch
from pelton.core.request import FinishReason, GenerateRequest, PrefillSource, RequestOutput
from pelton.serving import messages
from pelton.serving.kv_transfer import decode, peer, silence
from pelton.serving.kv_transfer.link import KVLink

LENGTH = 100


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """What `LENGTH` tokens are answered with."""
    engine = make_engine_of("llama", Role.MIXED, None)
    found: list[int] = []
    engine.add(make_request("a", LENGTH))
    while engine.has_work:
        for output in engine.step():
            found += output.token_ids
    return found


def check_fallback(pair: Pair, tokens: list[int], reason: str, caplog) -> None:
    answers = run_pair(pair, [make_request("a", LENGTH)])
    assert answers["a", 0].token_ids == tokens
    assert answers["a", 0].num_cached_tokens == 0
    stats = pair.decode.stats()
    assert (stats.pulls_total, stats.pull_fallbacks_total) == (0, 1)
    assert reason in caplog.text


def changing(change: Callable[[messages.BlockRun], messages.BlockRun]) -> Callable:
    """Changes the first run of every message about blocks."""

    def apply(message: messages.FromWorker) -> messages.FromWorker:
        if isinstance(message, messages.Blocks) and message.runs:
            runs = [change(message.runs[0]), *message.runs[1:]]
            return msgspec.structs.replace(message, runs=runs)
        return message

    return apply


def reverse(run: messages.BlockRun) -> messages.BlockRun:
    return msgspec.structs.replace(run, block_ids=run.block_ids[::-1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: msgspec.structs.replace(run, digest=b"x" * 16), "not those that were"),
        (reverse, "not those that were"),
        (lambda run: msgspec.structs.replace(run, block_ids=[7] * len(run.block_ids)), "not those"),
        (lambda run: msgspec.structs.replace(run, block_ids=[10**6] * len(run.block_ids)), "among"),
        (lambda run: msgspec.structs.replace(run, block_ids=[0] * len(run.block_ids)), "among"),
        (lambda run: msgspec.structs.replace(run, group=3), "no KV group 3"),
        (lambda run: msgspec.structs.replace(run, first_entry=99), "not the next one"),
        (lambda run: msgspec.structs.replace(run, block_ids=[1] * 99), "not the next one"),
    ],
    ids=["digest", "order", "other", "beyond", "null", "group", "entry", "many"],
)
def test_wrong_blocks_are_never_used(change, reason, tokens, caplog) -> None:
    with pair_of("llama", prefix_cache=False) as pair:
        pair.change = changing(change)
        check_fallback(pair, tokens, reason, caplog)


def test_blocks_that_are_overwritten_on_the_way_are_never_used(tokens, caplog) -> None:
    with pair_of("llama") as pair:

        def spoil(message: messages.FromWorker) -> messages.FromWorker:
            if isinstance(message, messages.Blocks):
                pair.prefill._executor.pool.caches[0][message.runs[0].block_ids[0], 0, 0, 0] += 1
            return message

        pair.change = spoil
        check_fallback(pair, tokens, "not those that were computed", caplog)


def test_a_missing_message_is_noticed(tokens, caplog) -> None:
    with pair_of("llama") as pair:
        dropped: list[messages.FromWorker] = []

        def drop_first(message: messages.FromWorker) -> messages.FromWorker | None:
            if isinstance(message, messages.Blocks) and not dropped:
                dropped.append(message)
                return None
            return message

        pair.change = drop_first
        check_fallback(pair, tokens, "not the next one", caplog)


def test_without_the_last_message_the_prompt_is_computed_here(tokens, caplog, monkeypatch) -> None:
    monkeypatch.setattr(decode, "MAX_WAIT_S", 0.3)
    with pair_of("llama") as pair:
        late: list[messages.FromWorker] = []

        def hold_last(message: messages.FromWorker) -> messages.FromWorker | None:
            if isinstance(message, messages.Blocks) and message.is_last:
                late.append(message)
                return None
            return message

        pair.change = hold_last
        check_fallback(pair, tokens, "No block came for 0.3 s", caplog)
        # And when it comes after all, it is about nothing.
        pair.change = lambda message: (
            late[0] if isinstance(message, messages.Heartbeat) else message
        )
        pair.settle()
        assert_all_is_given_back(pair.decode)


def test_a_message_twice_is_noticed(tokens, caplog) -> None:
    with pair_of("llama") as pair:
        last: list[messages.FromWorker] = []

        def repeat(message: messages.FromWorker) -> messages.FromWorker:
            if isinstance(message, messages.Heartbeat) and last:
                return last.pop()
            if isinstance(message, messages.Blocks):
                last.append(message)
            return message

        pair.change = repeat
        check_fallback(pair, tokens, "not the next one", caplog)


def test_a_refusing_engine_is_done_without(tokens, caplog) -> None:
    with pair_of("llama") as pair:
        pair.prefill.add(make_request("b", 50, max_tokens=200))
        request = replace(make_request("a", LENGTH), deadline_s=None)
        pair.worker._prefill._engine.leases.open = refuse  # type: ignore[method-assign, union-attr]
        pair.add(request)
        pair.until(lambda: not pair.decode.has_work)
        pair.prefill.cancel("b")
        pair.settle()
        found = [t for o in pair.outputs if o.request_id == "a" for t in o.token_ids]
    assert found == tokens
    assert "no lease" in caplog.text


def refuse(*arguments: object) -> None:
    raise InvalidRequestError("There is no lease to be had.")


def test_a_dead_engine_is_done_without(tokens, caplog) -> None:
    with pair_of("llama") as pair:
        pair.add(make_request("a", LENGTH))
        while not pair.prefill.leases.num_blocks:
            pair.pump()
        pair.kill_prefill()
        pair.until(lambda: not pair.decode.has_work)
        assert [t for o in pair.outputs for t in o.token_ids] == tokens
        assert pair.decode.stats().pull_fallbacks_total == 1
        assert "It is gone." in caplog.text
        pair.start_prefill()
        answers = run_pair(pair, [make_request("b", LENGTH + 1)])
        assert len(answers["b", 0].token_ids) == 12
        assert pair.decode.stats().pulls_total == 1


def test_a_silent_engine_is_done_without(tokens, caplog, monkeypatch) -> None:
    monkeypatch.setattr(peer, "SILENCE_S", 0.2)
    with pair_of("llama") as pair:
        pair.change = lambda message: None
        check_fallback(pair, tokens, "said nothing for 0.2 s", caplog)


def test_a_machine_that_stood_still_does_not_take_the_others_for_silent(
    tokens, monkeypatch
) -> None:
    with pair_of("llama", prefix_cache=False) as pair:
        run_pair(pair, [make_request("before", LENGTH)])
        pair.is_frozen = True
        pair.add(make_request("after", LENGTH))
        pair.decode.step()
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0)
        monkeypatch.setattr(silence, "time", later)
        pair.decode.step()
        pair.is_frozen = False
        pair.outputs.clear()
        pair.until(lambda: not pair.decode.has_work)
        assert [token for output in pair.outputs for token in output.token_ids] == tokens
        assert pair.decode.stats().pull_fallbacks_total == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_frozen_engine_is_waited_for_once(is_known: bool, tokens, monkeypatch) -> None:
    with pair_of("llama", prefix_cache=False) as pair:
        if is_known:
            run_pair(pair, [make_request("before", LENGTH)])
        pair.is_frozen = True
        monkeypatch.setattr(peer, "SILENCE_S", 0.2)
        run_pair(pair, [make_request("first", LENGTH)])
        monkeypatch.setattr(peer, "SILENCE_S", 3600.0)
        for name in ("second", "third"):
            pair.outputs.clear()
            pair.add(make_request(name, LENGTH))
            for _ in range(40):
                pair.pump()
            assert [t for o in pair.outputs for t in o.token_ids] == tokens
        assert pair.decode.stats().pull_fallbacks_total == 3

        pair.is_frozen = False
        pair.settle()
        pair.until_given_back()
        assert run_pair(pair, [make_request("last", LENGTH)])["last", 0].token_ids == tokens
        assert pair.prefill.stats().prefills_total == pair.decode.stats().pulls_total
        assert pair.decode.stats().pulls_total == 1 + is_known


def test_an_engine_that_speaks_again_right_after_it_was_passed_over(tokens, monkeypatch) -> None:
    """What was ordered while it was silent was never sent, so nothing may wait for it."""
    with pair_of("llama", prefix_cache=False) as pair:
        run_pair(pair, [make_request("before", LENGTH)])
        pair.is_frozen = True
        monkeypatch.setattr(peer, "SILENCE_S", 0.2)
        run_pair(pair, [make_request("first", LENGTH)])
        monkeypatch.setattr(peer, "SILENCE_S", 3600.0)
        pair.add(make_request("second", LENGTH))
        pair.decode.step()
        pair.is_frozen = False
        pair.outputs.clear()
        pair.until(lambda: not pair.decode.has_work)
        assert [token for output in pair.outputs for token in output.token_ids] == tokens
        assert pair.decode.stats().pull_fallbacks_total == 2
        pair.until_given_back()


def test_a_deadline_is_right_where_prompts_are_computed_on_another_host(monkeypatch) -> None:
    ahead_s, deadlines_s = 1e6, []
    with pair_of("llama", prefix_cache=False) as pair:
        run_pair(pair, [make_request("before", LENGTH)])
        add, receive, now_s = pair.prefill.add, pair.worker.receive, time.monotonic

        def note(request: GenerateRequest) -> None:
            deadlines_s.append(request.deadline_s)
            add(request)

        def receive_there(client: bytes, payload: bytes) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(time, "monotonic", lambda: now_s() + ahead_s)
                receive(client, payload)

        pair.prefill.add = note  # type: ignore[method-assign]
        pair.worker.receive = receive_there  # type: ignore[method-assign]
        for name, keys in (("beside", None), ("far", "those of a network")):
            pair._decode_link._decode._keys = keys  # type: ignore[union-attr, assignment]
            deadline_s = now_s() + 1000.0
            run_pair(pair, [replace(make_request(name, LENGTH), deadline_s=deadline_s)])
            assert deadlines_s[-1] is not None
            is_shifted = deadlines_s[-1] >= deadline_s + ahead_s / 2
            assert is_shifted == (name == "far")
        assert pair.decode.stats().pulls_total == 3


def test_an_engine_that_was_frozen_before_it_was_asked_and_then_died_is_let_go(
    tokens, caplog, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(peer, "SILENCE_S", 0.2)
    with pair_of("llama") as pair, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "p"))
        listener.listen()  # and never accepts
        pair.address = f"ipc://{tmp_path / 'p'}"
        check_fallback(pair, tokens, "said nothing for 0.2 s", caplog)
        assert pair._decode_link.num_peers == 1
        (tmp_path / "p").unlink()
        listener.close()
        pair.until(lambda: not pair._decode_link.num_peers)


def test_an_engine_that_ends_when_nothing_is_asked_of_it_is_not_lost(tokens, caplog) -> None:
    """As one that was drained."""
    caplog.set_level(logging.INFO)
    with pair_of("llama") as pair:
        assert run_pair(pair, [make_request("a", LENGTH)])["a", 0].token_ids == tokens
        pair.kill_prefill()
        pair.until(lambda: not pair._decode_link.num_peers)
    assert [(r.levelname, r.args[0]) for r in caplog.records] == [("INFO", pair.address)]


@pytest.mark.parametrize("has_file", [True, False])
def test_an_engine_that_died_before_it_was_asked_is_done_without_at_once(
    has_file: bool, tokens, caplog, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(peer, "SILENCE_S", 3600.0)
    path = tmp_path / "p"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    if not has_file:
        path.unlink()
    with pair_of("llama") as pair:
        pair.address = f"ipc://{path}"
        check_fallback(pair, tokens, "It is gone.", caplog)


def test_twenty_restarts_leave_nothing_behind() -> None:
    with pair_of("llama", prefix_cache=False) as pair:
        for number in range(20):
            answers = run_pair(pair, [make_request(str(number), 40, max_tokens=2)])
            assert len(answers[str(number), 0].token_ids) == 2
            pair.kill_prefill()
            pair.until(lambda: not pair._decode_link.num_peers)
            pair.start_prefill(keeps_address=number % 2 == 1)
        stats = pair.decode.stats()
        assert (stats.pulls_total, stats.pull_fallbacks_total) == (20, 0)
        assert num_mapped_pools() <= 3  # the newest engine's, and what is not collected yet


def num_mapped_pools() -> int:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-2] for line in lines if "memfd:pelton-kv" in line})


@pytest.mark.parametrize(("family", "count"), [("llama", 1000), ("gpt-oss", 12)])
def test_cancels_at_any_moment_leave_nothing_behind(family: str, count: int) -> None:
    source = random.Random(1)
    with pair_of(family) as pair:
        for number in range(count):
            request = make_request(str(number), source.randrange(20, 120), number, max_tokens=4)
            pair.add(request)
            for _ in range(source.randrange(12)):
                pair.pump()
            pair.decode.cancel(request.request_id)
        pair.until(lambda: not pair.decode.has_work)
        pair.until_given_back()
        answers = run_pair(pair, [make_request("last", LENGTH, max_tokens=2)])
        assert len(answers["last", 0].token_ids) == 2


def test_a_deadline_on_the_way_ends_both_sides() -> None:
    with pair_of("llama") as pair:
        clock = ManualClock(5.0)
        pair.decode._scheduler._clock = pair.prefill._scheduler._clock = clock
        pair.add(replace(make_request("a", LENGTH), deadline_s=6.0))
        pair.change = lambda message: None if isinstance(message, messages.Blocks) else message
        pair.settle(5)
        clock.advance(2.0)
        pair.until(lambda: not pair.decode.has_work)
        (output,) = pair.outputs
        assert (output.finish_reason, output.error_code) == (
            FinishReason.ERROR,
            "deadline_exceeded",
        )
        pair.until_given_back()


def test_a_lease_is_extended_from_when_its_prompt_is_queued() -> None:
    with pair_of("llama") as pair:
        run_pair(pair, [make_request("first", LENGTH, seed=1)])  # they know each other now
        clock = ManualClock()
        pair.prefill.leases._clock = clock
        pair.add(make_request("a", LENGTH))
        pair.decode.step()
        pair.deliver(1)
        for _ in range(3):  # its prompt stays queued
            clock.advance(29.0)
            pair._decode_link._decode._next_keep_s = 0.0  # type: ignore[union-attr]
            pair.decode.step()
            pair.deliver(1)
            pair.worker.heartbeat()
            assert (len(pair.prefill.leases), pair.prefill.leases.num_blocks) == (1, 0)
        clock.advance(31.0)
        pair.worker.heartbeat()
        assert len(pair.prefill.leases) == 0
        pair.until(lambda: not pair.decode.has_work)
        assert pair.decode.stats().pull_fallbacks_total == 1
        pair.until_given_back()


@pytest.mark.parametrize("room", [1, 2**26])
def test_between_two_steps_no_more_is_copied_than_there_is_room(room: int, monkeypatch) -> None:
    monkeypatch.setattr(decode, "_MAX_BYTES_PER_POLL", room)
    polls: list[list[int]] = []
    poll, go_on = decode.DecodeSide.poll, decode.DecodeSide._go_on

    def watch_poll(side: decode.DecodeSide) -> list[PullResult]:
        polls.append([])
        return poll(side)

    def watch_copies(side: decode.DecodeSide, pull: Any, room: int) -> list[PullResult]:
        before = pull.num_bytes
        results = go_on(side, pull, room)
        polls[-1].append(pull.num_bytes - before)
        return results

    monkeypatch.setattr(decode.DecodeSide, "poll", watch_poll)
    monkeypatch.setattr(decode.DecodeSide, "_go_on", watch_copies)
    requests = [make_request(str(seed), LENGTH, seed) for seed in range(3)]
    with pair_of("llama") as pair:
        run_pair(pair, [make_request("first", LENGTH, seed=7)])
        polls.clear()
        for request in requests:
            pair.add(request)
        pair.decode.step()
        pair.deliver(3)
        while pair.worker.has_work:  # all is there before the first copy
            pair.worker.step()
        pair.until(lambda: not pair.decode.has_work)
        assert pair.decode.stats().pull_fallbacks_total == 0
        pair.until_given_back()
    num_copied = [sum(num_bytes > 0 for num_bytes in copied) for copied in polls]
    assert sum(num_copied) >= 3
    assert max(num_copied) == (1 if room == 1 else 3)


def test_a_lease_that_nobody_extends_ends() -> None:
    with pair_of("llama") as pair:
        clock = ManualClock()
        pair.prefill.leases._clock = clock
        pair.add(make_request("a", LENGTH))
        pair.change = lambda m: None if isinstance(m, messages.Blocks) and m.is_last else m
        pair.until(lambda: pair.prefill.leases.num_blocks == -(-(LENGTH - 1) // 16))
        clock.advance(29.0)
        pair.settle(3)
        assert len(pair.prefill.leases) == 1
        pair._decode_link._decode._next_keep_s = 0.0  # type: ignore[union-attr]
        pair.decode.step()
        pair.deliver(1)
        clock.advance(29.0)
        pair.settle(3)
        assert len(pair.prefill.leases) == 1
        clock.advance(31.0)
        pair.until(lambda: not pair.decode.has_work)
        assert pair.decode.stats().pull_fallbacks_total == 1
        assert len([t for o in pair.outputs for t in o.token_ids]) == 12
        pair.until_given_back()


def layout(**fields: object) -> KVLayout:
    geometry = make_engine_of("llama", Role.MIXED, None).geometry
    values = {"model": "m", "device": "cpu", "fingerprint": "f", "dtype": "float32"}
    values |= {"block_size": 16, "groups": geometry.kv_groups}
    return KVLayout(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "difference",
    [
        {"model": "n"},
        {"device": "cuda"},
        {"fingerprint": "g"},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"groups": ()},
        {"format_version": 0},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_layouts_that_differ_are_named(difference: dict[str, object]) -> None:
    sentence = explain_mismatch(layout(), layout(**difference))
    assert sentence is not None
    assert next(iter(difference)).replace("_", " ") in sentence
    assert explain_mismatch(layout(), layout()) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": (0, 1)}, "number of layers of group 'full' differs (3 here, 2 there)"),
        ({"window": 8}, "window of group 'full' differs (0 here, 8 there)"),
    ],
)
def test_of_groups_that_differ_it_is_said_in_what(change: dict[str, object], text: str) -> None:
    mine = layout()
    changed = tuple(replace(group, **change) for group in mine.groups)  # type: ignore[arg-type]
    assert text in str(explain_mismatch(mine, layout(groups=changed)))


def test_a_worker_that_moves_no_kv_says_its_layout_too() -> None:
    links = [KVLink(role, zmq.Poller()) for role in (Role.MIXED, Role.DECODE)]
    for link in links:
        make_engine_of("llama", link.role, link.connect)
    mixed, decode = links
    assert mixed.layout is not None
    assert mixed.layout == decode.layout
    assert mixed.handle() is None
    decode.close()


def test_another_layout_is_refused_before_anything_moves(tokens, caplog) -> None:
    def make(role: Role, connect):
        if role is Role.PREFILL:
            return make_engine_of("llama-fp8-kv", role, connect)
        return make_engine_of("llama", role, connect)

    with Pair(make) as pair:
        check_fallback(pair, tokens, "as their dtype differs", caplog)
        assert pair.prefill.stats().prefills_total == 0


def test_an_engine_alone_refuses_what_it_cannot_do() -> None:
    engine = make_engine_of("llama", Role.MIXED, None)
    source = PrefillSource(address="ipc://x", min_tokens=2)
    with pytest.raises(InvalidRequestError, match="takes no KV from others"):
        engine.add(replace(make_request("a", 20), prefill_at=source))
    with pytest.raises(InvalidRequestError, match="computed where it is decoded"):
        engine.add(replace(make_request("a", 1), is_prefill_only=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_ends_with_the_right_tokens_and_nothing_held(seed: int, monkeypatch) -> None:
    """Messages lost and doubled, blocks overwritten, prefill killed, clients that leave."""
    clock = ManualClock()
    monkeypatch.setattr(decode, "time", SimpleNamespace(monotonic=clock.now_s))
    monkeypatch.setattr(decode, "MAX_WAIT_S", 0.2)
    source = random.Random(seed)
    lengths = source.sample(range(1, 110), 40)  # no two prompts are the same
    requests = [make_request(str(n), length) for n, length in enumerate(lengths)]
    expected = run_alone(make_engine_of("llama", Role.MIXED, None), requests)
    cancelled = set()
    with pair_of("llama") as pair:
        doubled: list[messages.FromWorker] = []

        def disturb(message: messages.FromWorker) -> messages.FromWorker | None:
            if isinstance(message, messages.Heartbeat) and doubled:
                return doubled.pop()
            if not isinstance(message, messages.Blocks):
                return message
            luck = source.random()
            if luck < 0.1:
                return None
            if luck < 0.2:
                doubled.append(message)
            if luck > 0.9 and message.runs:
                block = message.runs[0].block_ids[-1]
                pair.prefill._executor.pool.caches[0][block].add_(1)
            return message

        pump = pair.pump

        def pump_for_a_moment() -> list[RequestOutput]:
            clock.advance(0.002)
            return pump()

        pair.pump = pump_for_a_moment  # type: ignore[method-assign]
        pair.change = disturb
        for request in requests:
            pair.add(request)
            for _ in range(source.randrange(8)):
                pair.pump()
            if source.random() < 0.2:
                pair.decode.cancel(request.request_id)
                cancelled.add(request.request_id)
            if source.random() < 0.1:
                pair.kill_prefill()
                pair.settle(source.randrange(4))
                pair.start_prefill()
        pair.change = lambda message: message
        pair.until(lambda: not pair.decode.has_work)
        pair.until_given_back()
        answers = join(pair.outputs)
        stats = pair.decode.stats()
    assert stats.pulls_total > 5
    assert stats.pull_fallbacks_total > 1
    for key, answer in answers.items():
        if key[0] in cancelled:
            count = len(answer.token_ids)
            assert answer.token_ids == expected[key].token_ids[:count]
        else:
            assert answer.token_ids == expected[key].token_ids
    assert {key[0] for key in answers} | cancelled == {r.request_id for r in requests}


def test_an_engine_full_of_leases_waits_for_one_to_end() -> None:
    engine = make_engine_of("llama", Role.PREFILL, None, num_blocks=34, prefix_cache=False)
    for name in ("a", "b"):
        engine.leases.open(name, b"me", [0])
        engine.add(prefill_only(name, 300))
    for _ in range(20):
        engine.step()
    assert engine.is_starved
    assert [(news.lease_id, news.is_last) for news in engine.leases.take_news()][-1] == ("a", True)
    assert engine.stats().num_leased_blocks == 19
    engine.leases.close("a", b"me")
    while engine.has_work:
        engine.step()
    assert engine.leases.take_news()[-1].is_last
    engine.leases.close("b", b"me")
    assert_all_is_given_back(engine)


def test_a_higher_priority_gets_the_blocks_of_an_unfinished_lease() -> None:
    engine = make_engine_of("llama", Role.PREFILL, None, num_blocks=34, prefix_cache=False)
    engine.leases.open("low", b"me", [0])
    engine.add(prefill_only("low", 300, priority=1))
    for _ in range(3):
        engine.step()
    assert engine.leases.num_blocks > 0
    engine.leases.open("high", b"me", [0])
    engine.add(prefill_only("high", 400))
    for _ in range(9):  # until the last chunk of the one leaves room for the other
        engine.step()
    errors = {news.lease_id: news.error for news in engine.leases.take_news() if news.error}
    assert errors == {"low": "Another request needed the blocks."}
    engine.cancel("low")  # as whoever sends the news does
    while engine.has_work:
        engine.step()
    last = engine.leases.take_news()[-1]
    assert (last.lease_id, last.is_last, last.error) == ("high", True, None)
    engine.leases.close("high", b"me")
    assert_all_is_given_back(engine)
