# SPDX-License-Identifier: Apache-2.0
"""What a launcher makes of the lines of a worker that starts."""

import re

import pytest

import pelton
from pelton.core.errors import ConfigError
from pelton.serving import messages, worker
from pelton.serving.launcher import ReportedWorker

MINE = re.escape(f"Pelton {pelton.__version__}, protocol {messages.PROTOCOL_VERSION}")


class Said(ReportedWorker):
    """A worker whose process has said this."""

    def __init__(self, *lines: bytes) -> None:
        super().__init__(None, None)
        for line in lines:
            self.take_line(line)

    def describe_early_end(self, returncode: int) -> str:
        raise AssertionError(returncode)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (b'["Started",99,"9.9","and more"]', "the worker 9.9, protocol 99"),
        (b'["Ready",{"load":1.0}]', r'another version, which says b\'\["Ready"'),
        (b'["Bound","tcp://a:1"]', "another version"),
    ],
    ids=["started", "ready", "unknown"],
)
def test_a_worker_of_another_version_is_refused_by_its_first_strange_line(
    line: bytes, other: str
) -> None:
    with pytest.raises(ConfigError, match=f"The server runs {MINE}, and .*{other}"):
        Said(line).wait_ready(0.0)


def test_a_worker_of_this_version_is_ready_whatever_else_is_printed() -> None:
    started = messages.Started(messages.PROTOCOL_VERSION, "another of the same protocol")
    lines = [messages.encode_line(m) for m in (started, messages.Ready(address="ipc://a"))]
    said = Said(lines[0], b"[info] a library is loaded", lines[1])
    said.wait_ready(0.0)
    assert said.address == "ipc://a"


def test_a_worker_says_its_version_before_it_reads_an_order_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[messages.WorkerStatus] = []
    monkeypatch.setattr(worker, "read_first_line", lambda: b'["StartWorker",{"model":1}]')
    with pytest.raises(SystemExit, match=f"This worker runs {MINE}, and its order is of another"):
        worker.read_start(said.append)
    assert said == [messages.Started(messages.PROTOCOL_VERSION, pelton.__version__)]
