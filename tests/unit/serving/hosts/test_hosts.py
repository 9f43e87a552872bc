# SPDX-License-Identifier: Apache-2.0
"""Machines that join a server: real sockets and keys, workers of a stand-in."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from pelton.core.config import EngineConfig, HostConfig, ModelConfig, Role, WorkerPlace
from pelton.core.errors import ConfigError, UnavailableError, WorkerLostError
from pelton.serving import messages
from pelton.serving.hosts import agent as agents
from pelton.serving.hosts import launcher as launchers
from pelton.serving.hosts import messages as wire
from pelton.serving.hosts.agent import HostAgent
from pelton.serving.hosts.launcher import HostsLauncher, RemoteWorker
from pelton.serving.wire_keys import (
    WireGuard,
    WireKeys,
    read_keys,
    secure_client,
    write_new_keys,
)
from pelton.serving.worker_client import WorkerClient

ENGINE = EngineConfig(model=ModelConfig(model="stand-in:smollm2", max_model_len=512))


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_new_keys(tmp_path / "key")
    return str(tmp_path / "key")


@pytest.fixture
def launcher(key: str) -> Iterator[HostsLauncher]:
    launcher = HostsLauncher("tcp://127.0.0.1:*", read_keys(key))
    yield launcher
    launcher.close()
    launcher.close()


@contextmanager
def joined(launcher: HostsLauncher, key: str, **settings: object) -> Iterator[HostAgent]:
    config = HostConfig(join=launcher.endpoint, worker_key=key, **settings)  # type: ignore[arg-type]
    agent = HostAgent(config)
    thread = threading.Thread(target=agent.run)
    thread.start()
    yield agent
    agent.stop.set()
    thread.join()


def launch(
    launcher: HostsLauncher, codes: list[int], role: Role = Role.MIXED, index: int = 0
) -> RemoteWorker:
    start = messages.StartWorker(ENGINE, WorkerPlace(index=index, role=role), heartbeat_s=0.05)
    return launcher.launch(start, 1, on_progress=lambda phase: None, on_exit=codes.append)


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.01)


async def test_a_worker_on_a_machine_that_joins_later(launcher: HostsLauncher, key: str) -> None:
    codes: list[int] = []
    worker = launch(launcher, codes, index=5)
    with pytest.raises(UnavailableError):
        worker.wait_ready(0.1)
    with joined(launcher, key):
        worker.wait_ready(60)
        assert worker.address.startswith("tcp://127.0.0.1:")
        wait_until(lambda: worker.num_heartbeats > 1)
        client = await WorkerClient.connect(worker.address, keys=read_keys(key))
        assert client.info.address == worker.address
        with pytest.raises(UnavailableError):
            await WorkerClient.connect(worker.address, timeout_s=0.3)
        client.close()
        worker.stop()
        worker.stop()
        assert codes == [0] == [worker.returncode]

        # Its place is free again, and there is one only.
        first, second = launch(launcher, codes), launch(launcher, codes)
        first.wait_ready(60)
        with pytest.raises(UnavailableError):
            second.wait_ready(0.1)
        first.kill()
        wait_until(lambda: first.returncode == -9)
        second.wait_ready(60)
    wait_until(lambda: second.returncode == -9)  # the machine has left


def test_machines_are_for_their_role(launcher: HostsLauncher, key: str) -> None:
    with joined(launcher, key, role="decode", num_workers=2):
        worker = launch(launcher, [])
        with pytest.raises(UnavailableError):
            worker.wait_ready(0.3)
        worker.stop()
        assert worker.returncode == -9


def test_a_silent_machine_has_lost_its_workers(
    launcher: HostsLauncher, key: str, monkeypatch
) -> None:
    codes: list[int] = []
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join()))
        assert isinstance(wire.decode_to_host(socket.recv()), wire.Joined)
        worker = launch(launcher, codes)
        while not isinstance(order := wire.decode_to_host(socket.recv()), wire.Launch):
            continue
        assert order.start.config == ENGINE
        monkeypatch.setattr(wire, "SILENCE_S", 0.2)
        wait_until(lambda: codes == [-9])
    assert not launcher._hosts
    assert worker.returncode == -9
    with pytest.raises(WorkerLostError, match=r"lost.*the machine test.*said nothing for 0.2 s"):
        worker.wait_ready(1)


def test_a_server_that_stood_still_itself_does_not_blame_the_machines(
    launcher: HostsLauncher, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join()))
        assert isinstance(wire.decode_to_host(socket.recv()), wire.Joined)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6)
        monkeypatch.setattr(launchers, "time", clock)
        for _ in range(2):  # the machine is looked at when it gets its ping
            assert isinstance(wire.decode_to_host(socket.recv()), wire.Ping)
        is_known: list[bool] = []
        launcher.order(lambda: is_known.append(bool(launcher._hosts)))
        wait_until(lambda: is_known == [True])


def test_a_worker_that_is_killed_while_it_starts_there_is_told_of_as_that(
    launcher: HostsLauncher, key: str
) -> None:
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join()))
        worker = launch(launcher, [])
        while not isinstance(order := wire.decode_to_host(socket.recv()), wire.Launch):
            continue
        socket.send(wire.encode(wire.Exited(order.worker, -9)))
        with pytest.raises(WorkerLostError, match=r"on test ended by signal 9.*'pelton worker'"):
            worker.wait_ready(60)


def test_a_machine_that_lost_its_server_ends_its_workers_and_joins_the_next(
    key: str, monkeypatch
) -> None:
    # An address of this process's own: nobody else takes the port before the second does.
    first = HostsLauncher(
        f"tcp://127.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}:*", read_keys(key)
    )
    address = first.endpoint
    with joined(first, key) as agent:
        worker = launch(first, [])
        worker.wait_ready(60)
        (child,) = agent._children.values()
        first.close()
        with monkeypatch.context() as patch:
            patch.setattr(wire, "SILENCE_S", 0.5)
            wait_until(lambda: child.returncode is not None)
        second = HostsLauncher(address, read_keys(key))
        assert worker.returncode == -9  # nobody was there to see how it ended
        successor = launch(second, [])
        successor.wait_ready(60)
        successor.stop()
        second.close()


def test_a_machine_that_stood_still_itself_keeps_its_workers(
    launcher: HostsLauncher, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    with joined(launcher, key):
        worker = launch(launcher, codes)
        worker.wait_ready(60)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6)
        monkeypatch.setattr(agents, "time", clock)
        num_before = worker.num_heartbeats
        wait_until(lambda: codes or worker.num_heartbeats > num_before + 10)
        assert not codes


def test_another_version_is_turned_away(launcher: HostsLauncher, key: str) -> None:
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join(protocol=1)))
        answer = wire.decode_to_host(socket.recv())
    assert isinstance(answer, wire.TurnedAway)
    assert "install one version on both" in answer.error


@pytest.mark.parametrize(
    "parts", [[b"junk"], [b""], [b"\x93\xa4Join\x01\x02"], [wire.encode(wire.Ping()), b"more"]]
)
def test_what_is_not_understood_is_turned_away_and_harms_nobody(
    parts: list[bytes], launcher: HostsLauncher, key: str
) -> None:
    with connected(launcher, read_keys(key)) as socket:
        socket.send_multipart(parts)
        assert socket.poll(60_000)
        answer = wire.decode_to_host(socket.recv())
        assert isinstance(answer, wire.TurnedAway)
        assert "install one version on both" in answer.error
        socket.send(wire.encode(make_join()))
        assert socket.poll(60_000)
        assert isinstance(wire.decode_to_host(socket.recv()), wire.Joined)


def test_orders_that_are_not_understood_end_the_agent_with_a_sentence(key: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        guard = WireGuard(context, read_keys(key))
        guard.secure(server)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        agent = HostAgent(HostConfig(join=f"tcp://127.0.0.1:{port}", worker_key=key))
        errors: list[ConfigError] = []

        def run() -> None:
            try:
                agent.run()
            except ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        identity, _ = server.recv_multipart()
        server.send_multipart([identity, b"junk"])
        thread.join(60)
        guard.close()
    assert "install one version on both" in errors[0].message


@pytest.mark.parametrize(
    "join", ["tcp://127.0.0.1:70000", "10.0.0.1:7000", "tcp://:7000", "tcp://10.0.0.1:x"]
)
@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_what_is_no_address_of_a_server_is_named(join: str, host: str, key: str) -> None:
    with pytest.raises(ConfigError, match="--join tcp://HOST:PORT"):
        HostAgent(HostConfig(join=join, host=host, worker_key=key)).run()


def test_a_machine_that_starts_no_process_says_so_and_stays(
    launcher: HostsLauncher, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise UnavailableError("The system starts no further process.")

    with joined(launcher, key):
        with monkeypatch.context() as patch:
            patch.setattr(agents, "ChildProcess", refuse)
            first = launch(launcher, [])
            with pytest.raises(UnavailableError, match="no further process"):
                first.wait_ready(60)
            wait_until(lambda: first.returncode is not None)
        launch(launcher, []).wait_ready(60)


def test_a_machine_whose_connection_broke_takes_no_worker_along(
    launcher: HostsLauncher, key: str
) -> None:
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join()))
        assert isinstance(wire.decode_to_host(socket.recv()), wire.Joined)
    (identity,) = launcher._hosts
    is_connected: list[bool] = []
    ping = partial(launcher._send, identity, wire.Ping())

    def is_broken() -> bool:
        launcher.order(lambda: is_connected.append(ping()))
        return False in is_connected

    wait_until(is_broken)
    worker = launch(launcher, [])
    with joined(launcher, key):
        worker.wait_ready(60)
        worker.stop()


def test_a_launcher_that_closes_leaves_nobody_waiting(key: str) -> None:
    launcher = HostsLauncher("tcp://127.0.0.1:*", read_keys(key))
    with connected(launcher, read_keys(key)) as socket:
        socket.send(wire.encode(make_join()))
        codes: list[int] = []
        launch(launcher, codes)
        launch(launcher, codes)
        wait_until(lambda: len(launcher._waiting) == 1 and launcher._hosts)
        launcher.close()
        assert codes == [-9, -9]


def test_without_the_key_nobody_joins(launcher: HostsLauncher) -> None:
    stranger = WireKeys(*(half.decode() for half in zmq.curve_keypair()))
    with connected(launcher, stranger) as socket:
        socket.send(wire.encode(make_join()))
        assert not socket.poll(300)
    assert not launcher._hosts


def test_keys_are_files_of_their_owner_only(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="pelton worker --new-key"):
        read_keys("")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="exists already"):
        write_new_keys(Path(key))
    assert os.stat(key).st_mode & 0o777 == 0o600
    os.chmod(key, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(key)


def test_an_address_that_cannot_be_had_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match="Machines cannot join at tcp"):
        HostsLauncher("tcp://203.0.113.7:1", read_keys(key))


def make_join(protocol: int = messages.PROTOCOL_VERSION) -> wire.Join:
    import pelton

    return wire.Join(wire.VERSION, protocol, pelton.__version__, "test", 1, None)


@contextmanager
def connected(launcher: HostsLauncher, keys: WireKeys) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, keys)
        socket.connect(launcher.endpoint)
        yield socket
