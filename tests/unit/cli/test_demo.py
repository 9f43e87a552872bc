# SPDX-License-Identifier: Apache-2.0
"""What the demo says of its server's workers."""

from typing import Any

import pytest

from pelton.cli import demo

STATS = {"generated_tokens_total": 0, "prefills_total": 0, "pulls_total": 0}
STATS |= {"pulled_bytes_total": 0, "pull_fallbacks_total": 0}


def describe(monkeypatch: pytest.MonkeyPatch, *workers: tuple[str, dict[str, int] | None]) -> Any:
    cards = [
        {"worker": str(i), "role": role, "stats": stats and STATS | stats}
        for i, (role, stats) in enumerate(workers)
    ]
    monkeypatch.setattr(demo, "_call", lambda url: ({"workers": cards}, {}))
    return list(demo._describe_workers("http://server"))


def test_each_role_says_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = {"pulls_total": 6, "pulled_bytes_total": 1_500_000_000, "pull_fallbacks_total": 1}
    decode = {**pulled, "generated_tokens_total": 40}
    said = describe(monkeypatch, ("prefill", {"prefills_total": 6}), ("decode", decode))
    assert said == [
        "Worker 0 (prefill) computed 6 prompts for the other.",
        "Worker 1 (decode) took the KV of 6 prompts, 1.50 GB, and decoded 40 tokens; 1 prompts it"
        " had to compute itself.",
    ]


def test_one_worker_and_one_that_is_down_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(monkeypatch, ("mixed", {"prefills_total": 6})) == []
    assert describe(monkeypatch, ("prefill", None), ("decode", None)) == []
