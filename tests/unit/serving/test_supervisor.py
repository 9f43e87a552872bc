# SPDX-License-Identifier: Apache-2.0
"""What the supervisor decides without processes: when to restart, where to listen."""

import fcntl
import io
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pelton.core.config import EngineConfig, ModelConfig, ServerConfig
from pelton.core.errors import ConfigError
from pelton.serving.http import main as frontend_main
from pelton.serving.launcher import Launcher
from pelton.serving.process import LOCK_NAME, raise_file_limit
from pelton.serving.restart_policy import RestartPolicy
from pelton.serving.runtime_directory import RuntimeDirectory
from pelton.serving.supervisor import Supervisor, bind_socket, make_url


def test_restarts_come_later_each_time_and_then_no_more() -> None:
    policy = RestartPolicy(max_restarts=4, first_delay_s=1.0, max_delay_s=5.0)
    assert [policy.next_delay_s(now_s) for now_s in range(5)] == [1.0, 2.0, 4.0, 5.0, None]


def test_deaths_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=10.0, first_delay_s=1.0)
    assert [policy.next_delay_s(now_s) for now_s in (0.0, 11.0, 22.0)] == [1.0, 1.0, 1.0]


def test_port_in_use_is_named() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            bind_socket("127.0.0.1", port)


def test_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind_socket("no.such.host.invalid", 0)


@pytest.mark.parametrize("host", ["a" * 300, "a..b", ""])
def test_what_is_no_host_is_a_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match="Cannot listen"):
        bind_socket(host, 0)


@pytest.mark.parametrize("folder", ["x" * 100, "missing"])
def test_a_directory_that_cannot_hold_sockets_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / folder))
    if folder != "missing":
        (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        RuntimeDirectory()
    assert [entry for path in tmp_path.iterdir() for entry in path.iterdir()] == []


@pytest.mark.parametrize(
    ("module", "name"), [(tempfile, "mkdtemp"), (os, "open"), (fcntl, "flock")]
)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_start_that_runs_beside_another_never_takes_its_directory(
    module: Any, name: str, is_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start comes just before or just after each step of the first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directories: list[RuntimeDirectory] = []
    has_begun = False

    def start_another() -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            directories.append(RuntimeDirectory())

    def interleaved(*args: Any, **kwargs: Any) -> Any:
        if is_before:
            start_another()
        result = function(*args, **kwargs)
        start_another()
        return result

    function = getattr(module, name)
    monkeypatch.setattr(module, name, interleaved)
    directories.append(RuntimeDirectory())
    assert len({directory.path for directory in directories}) == 2
    assert all((directory.path / LOCK_NAME).exists() for directory in directories)
    for directory in directories:
        directory.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_start_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned = RuntimeDirectory()
    os.close(abandoned.lock_fd)  # as its end would
    RuntimeDirectory().close()
    assert list(tmp_path.iterdir()) == []


def test_the_soft_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 4096))
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    raise_file_limit()
    assert changed == [(4096, 4096)]


def test_url_of_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind_socket("::1", 0) as listener:
        assert make_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


async def test_a_server_that_cannot_have_its_launcher_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refuse(directory: RuntimeDirectory) -> Launcher:
        raise ConfigError("Machines cannot join there.")

    engine = EngineConfig(model=ModelConfig(model="smollm2"))
    supervisor = Supervisor(engine, ServerConfig(port=0), print, print, refuse)
    with pytest.raises(ConfigError, match="cannot join there"):
        await supervisor.run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("lines", "code"), [(b"", 0), (b"junk\n", 2)])
def test_a_frontend_ends_with_its_supervisor_and_with_orders_that_it_does_not_know(
    lines: bytes, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    monkeypatch.setattr(os, "fdopen", lambda *args, **options: io.BytesIO(lines))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        frontend_main._read_orders(print, str(directory))
    assert end.value.code == code
    assert directory.exists() == (code != 0)
