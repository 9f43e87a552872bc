# SPDX-License-Identifier: Apache-2.0
"""What the supervisor decides without processes: when to restart, where to listen."""

import socket
from pathlib import Path

import pytest

from pelton.core.errors import ConfigError
from pelton.serving.launcher import RuntimeDirectory
from pelton.serving.supervisor import RestartPolicy, bind_socket, make_url


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


def test_url_of_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind_socket("::1", 0) as listener:
        assert make_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"
