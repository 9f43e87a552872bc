# SPDX-License-Identifier: Apache-2.0
"""What the supervisor holds of its frontends: on processes that are none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from pelton.core.config import ServerConfig
from pelton.core.errors import ConfigError, PeltonError, UnavailableError
from pelton.serving import frontend_group, messages
from pelton.serving.child_process import ChildProcess
from pelton.serving.frontend_group import FrontendGroup

ADDRESS = "ipc:///somewhere"


class FakeChild:
    """Says what the test has it say."""

    returncode: int | None = None
    has_room = True
    pid = 0

    def __init__(
        self,
        module: str,
        arguments: list[str],
        first_line: bytes,
        *,
        on_line: Callable[[bytes], None],
        on_exit: Callable[[int], None],
        pass_fds: tuple[int, ...],
        environment: dict[str, str],
    ) -> None:
        self._on_line, self._on_exit = on_line, on_exit
        self.environment = environment
        self.orders: list[messages.ToFrontend] = []

    def say(self, message: Any) -> None:
        self._on_line(messages.encode_line(message).rstrip())

    def send(self, line: bytes) -> None:
        self.orders.append(messages.decode_to_frontend(line))

    def kill(self) -> None:
        self.end(-9)

    def end(self, code: int) -> None:
        self.returncode = code
        self._on_exit(code)


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., FakeChild] = FakeChild,
    frontends: int = 2,
    heartbeat_s: float = 1000.0,
) -> AsyncIterator[tuple[FrontendGroup, "asyncio.Task[None]"]]:
    monkeypatch.setattr(frontend_group, "ChildProcess", make)
    config = ServerConfig(frontends=frontends, worker_heartbeat_s=heartbeat_s)
    start = messages.StartFrontend(config, "smollm2", 0, "")
    group = FrontendGroup(config, start, (), lambda: [], lambda worker, generation: None)
    task = asyncio.create_task(group.run())
    await until(lambda: len(group.children()) == frontends)
    try:
        yield group, task
    finally:
        group.is_stopping = True
        task.cancel()
        with suppress(asyncio.CancelledError, PeltonError):
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def children(group: FrontendGroup) -> list[FakeChild]:
    return group.children()  # type: ignore[return-value]


async def all_listen(group: FrontendGroup) -> None:
    for child in children(group):
        child.say(messages.Listening())
    await until(lambda: group.has_all([]))


async def test_memory_is_in_huge_pages_unless_the_user_wants_another_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    async with running(monkeypatch, frontends=1) as (group, _):
        environment = children(group)[0].environment
    assert environment["PYTHONMALLOC"] == "pymalloc"
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_no_drain_waits_for_a_process_that_is_gone(
    is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died while it was drained, and the frontends left it before they could say so."""
    async with running(monkeypatch) as (group, _):
        await all_listen(group)
        group.use(1, 1, ADDRESS)
        draining = asyncio.create_task(group.drain(1, 1, 600.0))
        await until(lambda: isinstance(children(group)[1].orders[-1], messages.DrainWorker))
        if is_replaced:
            group.use(1, 2, ADDRESS)
        else:
            group.forget(1)
        async with asyncio.timeout(60):
            await draining


async def test_a_drain_waits_for_every_frontend_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as (group, _):
        await all_listen(group)
        group.use(1, 1, ADDRESS)
        draining = asyncio.create_task(group.drain(1, 1, 600.0))
        await until(lambda: isinstance(children(group)[1].orders[-1], messages.DrainWorker))
        first, second = children(group)
        first.say(messages.Released(1, 1))
        await asyncio.sleep(0.1)
        assert not draining.done()
        second.end(-9)
        async with asyncio.timeout(60):
            await draining


async def test_a_frontend_that_stands_still_is_replaced_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(monkeypatch, heartbeat_s=0.1) as (group, _):
        await all_listen(group)
        first, second = children(group)

        async def beat() -> None:
            while True:
                first.say(messages.Alive())
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        group.use(1, 1, ADDRESS)
        first.say(messages.Serving(1, 1))
        first.say(messages.Released(1, 1))
        async with asyncio.timeout(60):
            await group.drain(1, 1, 600.0)
            while children(group)[1] is second:
                await asyncio.sleep(0.01)
        assert (first.returncode, second.returncode) == (None, -9)
        assert group.is_used(1, 1)
        assert "event=frontend_frozen frontend=1" in caplog.text
        beating.cancel()


async def test_a_frontend_that_reads_no_orders_any_more_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as (group, _):
        await all_listen(group)
        first, second = children(group)
        second.has_room = False
        group.use(1, 1, ADDRESS)
        assert (second.orders, second.returncode) == ([], -9)
        assert first.orders == [messages.UseWorker(ADDRESS, 1, 1)]
        await until(lambda: children(group)[1] is not second)


def test_a_child_that_reads_nothing_has_no_room_once_its_pipe_is_full() -> None:
    lines: list[bytes] = []
    child = ChildProcess(
        *("http.server", ["0", "--bind", "127.0.0.1"], b"first\n"),
        on_line=lines.append,
        on_exit=lambda code: None,
    )
    num_sent = 0
    while child.has_room and num_sent < 1000:
        child.send(b"x" * 4095 + b"\n")
        num_sent += 1
    child.kill()
    child.stop()
    assert 1 < num_sent < 1000
    assert child.has_room
    child.send(b"to nobody\n")


async def test_a_worker_is_used_once_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (group, _):
        assert not group.is_used(1, 1)
        await all_listen(group)
        group.use(1, 1, ADDRESS)
        first, second = children(group)
        first.say(messages.Serving(1, 1))
        await asyncio.sleep(0.05)
        assert not group.is_used(1, 1)
        second.say(messages.Serving(1, 1))
        await until(lambda: group.is_used(1, 1))
        group.use(1, 2, ADDRESS)
        assert not group.is_used(1, 1)


async def test_a_first_frontend_that_cannot_start_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as (group, task):
        child = children(group)[0]
        child.say(messages.StartFailed(messages.ErrorInfo.of(ConfigError("No tokenizer."))))
        child.end(2)
        with pytest.raises(ConfigError, match="No tokenizer"):
            await task


async def test_a_later_one_that_cannot_start_leaves_the_serving_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as (group, task):
        await all_listen(group)
        first = children(group)[0]
        first.end(-9)
        await until(lambda: children(group)[0] is not first)
        second = children(group)[0]
        second.say(messages.StartFailed(messages.ErrorInfo.of(ConfigError("No tokenizer."))))
        second.end(2)
        await until(lambda: children(group)[0] is not second)
        assert not task.done()


async def test_a_system_that_starts_no_process_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeChild] = []

    def make(*args: Any, **options: Any) -> FakeChild:
        if len(made) == 2:
            made.append(made[0])
            raise UnavailableError("The system starts no further process.")
        made.append(FakeChild(*args, **options))
        return made[-1]

    async with running(monkeypatch, make) as (group, task):
        await all_listen(group)
        children(group)[0].end(-9)
        await until(lambda: len(made) == 4)
        assert not task.done()
