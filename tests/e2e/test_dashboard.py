# SPDX-License-Identifier: Apache-2.0
"""The page at `/dashboard` in a real browser, where one is installed."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from browser import CHROMIUM, Page, open_page
from server_process import ServerProcess, running_server, wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

MODEL = "stand-in:smollm2?scheduled=1&step_ms=1"
WITH_KV = (
    *("smollm2", "--random-weights", "smollm2-135m", "--layers", "2", "--dtype", "float32"),
    *("--device", "cpu", "--num-threads", "1", "--max-model-len", "2048", "--num-blocks", "400"),
)
"""Stand-ins have no keys and values to move."""
ROWS = "[...document.querySelectorAll('#{} tr')].map((row) => row.innerText)"


@contextmanager
def watched(profile: Path, *options: str) -> Iterator[tuple[ServerProcess, Page]]:
    with (
        running_server(MODEL, *options) as server,
        open_page(f"{server.url}/dashboard", profile) as page,
    ):
        yield server, page


def rows(page: Page, table: str) -> list[str]:
    found: list[str] = page.evaluate(ROWS.format(table))
    return found


def cells(page: Page, table: str, label: str) -> list[str]:
    """A column, by its head."""
    select = f"document.querySelectorAll('#{table} [data-label=\"{label}\"]')"
    found: list[str] = page.evaluate(f"[...{select}].map((cell) => cell.innerText)")
    return found


def status(page: Page) -> str:
    found: str = page.evaluate("document.getElementById('status')?.textContent ?? ''")
    return found


def serve_some(server: ServerProcess, num_requests: int) -> None:
    for i in range(num_requests):
        body = {"prompt": [400 + i] * 40, "max_tokens": 20, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()


def test_two_workers_their_latency_and_the_routes_are_shown(tmp_path: Path) -> None:
    with running_server(MODEL, "--workers", "2") as server:
        serve_some(server, 4)
        url = f"{server.url}/dashboard?ttft_ms=0.001&tpot_ms=1000000"
        with open_page(url, tmp_path) as page:
            wait_until(lambda: len(rows(page, "workers")) == 2)
            first, second = rows(page, "workers")
            ttft, tpot = rows(page, "latency")
            assert first.startswith("0 mixed up")
            assert second.startswith("1 mixed up")
            assert ttft.count("over") == 3
            assert "over" not in tpot
            assert len(rows(page, "routes")) == 4
            assert all("0: " in scores for scores in cells(page, "routes", "Scores"))
            wait_until(lambda: cells(page, "workers", "Waiting") == ["0", "0"])
            for _ in range(2):  # while the page looks on
                serve_some(server, 4)
            wait_until(lambda: bool(set(cells(page, "workers", "Output tok/s")) - {"0"}))
            wait_until(lambda: "80%" in "".join(cells(page, "workers", "Cache hits")))
            assert all("% in all" in cell for cell in cells(page, "workers", "Cache hits"))
            assert page.complaints == []


def test_roles_and_what_moves_between_them_are_shown(tmp_path: Path) -> None:
    with (
        running_server(*WITH_KV, "--prefill", "1", "--decode", "1") as server,
        open_page(f"{server.url}/dashboard", tmp_path) as page,
    ):
        wait_until(lambda: len(rows(page, "workers")) == 2)
        body = {"prompt": list(range(400, 1000)), "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
        # Each worker says at its own time what it did.
        wait_until(lambda: "1 prompts" in rows(page, "workers")[0])
        wait_until(lambda: "1 pulls" in rows(page, "workers")[1])
        first, second = rows(page, "workers")
        assert first.startswith("0 prefill up")
        assert second.startswith("1 decode up")
        assert "GB/s while copying" in second
        assert "0 fallbacks" in second
        nothing = re.compile(r"0%\s*of 399 blocks")
        wait_until(lambda: nothing.fullmatch(cells(page, "workers", "KV use")[1]) is not None)
        assert page.complaints == []


def test_a_killed_worker_is_stale_and_comes_back(tmp_path: Path) -> None:
    with watched(tmp_path, "--workers", "2") as (server, page):
        wait_until(lambda: len(rows(page, "workers")) == 2)
        stale = "document.querySelector('tr.stale')?.innerText ?? ''"
        server.process.send_signal(signal.SIGSTOP)  # the supervisor replaces nothing
        try:
            server.workers()[0].kill()
            wait_until(lambda: "as of" in page.evaluate(stale))
        finally:
            server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: any("process 2" in row for row in rows(page, "workers")))
        wait_until(lambda: page.evaluate(stale) == "")
        assert page.complaints == []


def test_a_frozen_worker_is_silent(tmp_path: Path) -> None:
    with watched(tmp_path, "--workers", "2", "--worker-heartbeat-s", "60") as (server, page):
        wait_until(lambda: len(rows(page, "workers")) == 2)
        worker = server.workers()[0]
        worker.suspend()
        try:
            wait_until(lambda: any("silent" in row for row in rows(page, "workers")))
        finally:
            worker.resume()
        wait_until(lambda: not any("silent" in row for row in rows(page, "workers")))


def test_a_frozen_server_is_said_to_be_and_polled_until_it_answers(tmp_path: Path) -> None:
    with watched(tmp_path, "--worker-heartbeat-s", "60") as (server, page):
        wait_until(lambda: status(page) == "live")
        frontend: psutil.Process = server.frontend
        frontend.suspend()
        try:
            wait_until(lambda: status(page).startswith("no answer for"))
            assert page.evaluate("document.body.className") == "stale"
            assert len(rows(page, "workers")) == 1
        finally:
            frontend.resume()
        wait_until(lambda: status(page) == "live")
        assert page.evaluate("document.body.className") == ""


def test_a_key_is_asked_for_and_kept_for_a_reload(tmp_path: Path) -> None:
    with watched(tmp_path, "--api-key", "secret") as (_, page):
        wait_until(lambda: status(page) == "waiting for the key")
        fill = "document.getElementById('key').value = {!r};"
        send = "document.getElementById('key-form').requestSubmit()"
        page.evaluate(fill.format("wrong") + send)
        text = "document.getElementById('key-text').textContent"
        wait_until(lambda: "not this server's" in page.evaluate(text))
        page.evaluate(fill.format("secret") + send)
        wait_until(lambda: status(page) == "live")
        page.command("Page.reload")
        wait_until(lambda: status(page) == "live" and len(rows(page, "workers")) == 1)
