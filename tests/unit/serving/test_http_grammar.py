# SPDX-License-Identifier: Apache-2.0
"""Grammars over HTTP: compiling that takes long, clients that leave, outputs that get stuck."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from in_memory import make_engine, running_server
from test_http_tools import HELLO, ScriptedEngine

from pelton.core.grammar import Grammar
from pelton.core.request import FinishReason, RequestOutput
from pelton.engine.grammar import GrammarCompiler
from pelton.serving.http import grammars

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


class Gate:
    """Holds the compiler up until it is opened. Nobody's time to wait begins before it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event, self.compiled = threading.Event(), list[str]()
        self.is_entered = threading.Event()
        compile_now = GrammarCompiler._compile
        begin = GrammarCompiler.compile_in_background

        def begin_and_wait(compiler: GrammarCompiler, grammar: Grammar) -> Any:
            compiling = begin(compiler, grammar)
            assert self.is_entered.wait(60)
            return compiling

        def wait(compiler: GrammarCompiler, grammar: Grammar) -> Any:
            self.is_entered.set()
            self.event.wait(60)
            self.compiled.append(grammar.text)
            return compile_now(compiler, grammar)

        monkeypatch.setattr(GrammarCompiler, "_compile", wait)
        monkeypatch.setattr(GrammarCompiler, "compile_in_background", begin_and_wait)
        monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.05)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.event.set()


def ask(pattern: str) -> dict[str, Any]:
    return {"messages": HELLO, "guided_regex": pattern}


async def test_what_takes_too_long_is_refused_and_what_never_had_its_turn_may_come_again(
    gate: Gate,
) -> None:
    async with running_server() as server:
        slow, waiting = await asyncio.gather(
            server.post(CHAT, ask("a")), server.post(CHAT, ask("b"))
        )
        assert (slow.status, slow.error["param"]) == (400, "guided_regex")
        assert "takes longer than 0.05 s to compile" in slow.error["message"]
        assert (waiting.status, waiting.headers["retry-after"]) == (429, "1")
        # Nobody compiles what nobody waits for, and other requests never noticed.
        assert (await server.post(CHAT, {"messages": HELLO, "max_tokens": 2})).status == 200
        gate.event.set()
        await asyncio.to_thread(server.frontend.grammars.compile, Grammar.regex("c"))
        assert gate.compiled == ["a", "c"]
        assert server.frontend.metrics.errors == {"invalid_grammar": 1, "queue_full": 1}


class StuckEngine(ScriptedEngine):
    """Three tokens, then the grammar leads nowhere."""

    def _advance(self, choice: Any, now_s: float) -> RequestOutput:
        output = super()._advance(choice, now_s)
        if choice.num_generated < self.num_good:
            return output
        return RequestOutput(
            output.request_id,
            output.index,
            [],
            finish_reason=FinishReason.ERROR,
            error="The output cannot follow its grammar any further.",
            error_code="grammar_too_complex",
        )

    num_good = 0


@pytest.mark.parametrize("num_good", [0, 3])
async def test_an_output_that_gets_stuck_names_its_field(num_good: int) -> None:
    engine = StuckEngine("one two three four")
    engine.num_good = num_good
    async with running_server(engine=engine) as server:
        whole = await server.post(CHAT, ask(".*"))
        assert whole.status == 400
        many = await server.post(CHAT, {**ask(".*"), "stream": True})
        told = [whole.error]
        if num_good:
            frames = many.body.decode().split("\n\n")
            assert frames[-2] == "data: [DONE]"
            told.append(json.loads(frames[-3].removeprefix("data: "))["error"])
        else:
            told.append(many.error)
        assert [(error["code"], error["param"]) for error in told] == [
            ("grammar_too_complex", "guided_regex")
        ] * 2
        body = {"input": "x", "text": {"format": {"type": "json_object"}}}
        reply = await server.post(RESPONSES, body)
        assert (reply.status, reply.error["param"]) == (400, "text.format")


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_nothing(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 60.0)
    engine = make_engine()
    async with running_server(engine=engine) as server:
        task = asyncio.create_task(server.post(CHAT, ask("d")))
        assert await asyncio.to_thread(gate.is_entered.wait, 60)
        task.cancel()
        gate.event.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.has_work
        assert server.frontend.metrics.num_live == 0
