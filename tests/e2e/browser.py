# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium over its DevTools pipe: opens a page, looks into it, hears its console."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Page:
    """One page. `complaints` has what its console got since it was opened, and exceptions."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._numbers = itertools.count()
        self._received = b""
        self._session = ""
        self.complaints: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        """The command's result. Events that come before it are looked at on the way."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
            ):
                self.complaints.append(json.dumps(reply["params"]))

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _receive(self) -> Any:
        while b"\0" not in self._received:
            data = os.read(self._read_fd, 1 << 16)
            assert data, "Chromium has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextmanager
def open_page(url: str, profile: Path) -> Iterator[Page]:
    """`profile`: an empty folder that Chromium may fill."""
    assert CHROMIUM is not None
    # Chromium reads commands from descriptor 3 and answers on 4.
    redirect = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
    process = subprocess.Popen(
        ["sh", "-c", redirect, "sh", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        page = Page(process.stdout.fileno(), process.stdin.fileno())
        page.command("Page.navigate", url=url)
        yield page
    finally:
        process.stdin.close()  # which ends it
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
