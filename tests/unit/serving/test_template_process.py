# SPDX-License-Identifier: Apache-2.0
"""Templates of requests, rendered in a process that the frontend can do without."""

import asyncio
from typing import Any

import pytest
from in_memory import Reply, Server, running_server

from pelton.serving import template_process

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
# Compares two lists of 2 ** 60 leaves inside one operation of the interpreter.
ENDLESS = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
)
ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}{{ eos_token }}"


def ask(server: Server, template: str, **fields: Any) -> "asyncio.Task[Reply]":
    body = {"messages": HELLO, "max_tokens": 2, "chat_template": template, **fields}
    return asyncio.create_task(server.post(CHAT, body))


async def wait_until_rendering(server: Server) -> None:
    while server.frontend.template_process._process is None:
        await asyncio.sleep(0.01)


async def test_a_stream_goes_on_while_an_endless_template_is_rendered() -> None:
    async with running_server() as server:
        server.frontend.template_process.cpu_limit_s = 1000
        hostile = ask(server, ENDLESS)
        await wait_until_rendering(server)
        stream = await server.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 50, "stream": True}
        )
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
        assert not hostile.done()
        server.frontend.template_process.kill()
        assert (await hostile).status == 400


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_an_endless_template_is_the_requests_error_and_the_next_is_rendered(
    path: str,
) -> None:
    async with running_server() as server:
        server.frontend.template_process.cpu_limit_s = 0.2
        body = {"messages": HELLO, "chat_template": ENDLESS}
        reply = await server.post(path, body)
        assert reply.status == 400
        assert reply.error["param"] == "chat_template"
        assert "more than 0.2 s" in reply.error["message"]
        server.frontend.template_process.cpu_limit_s = 1000
        assert (await ask(server, ECHO)).status == 200


async def test_text_equals_what_the_frontend_itself_would_render() -> None:
    async with running_server() as server:
        arguments = {"messages": HELLO, "template": ECHO}
        text = await server.frontend.template_process.render(arguments, {"extra": "\u00fc"})
        assert text == server.frontend.chat_template.render(**arguments, extra="\u00fc")  # type: ignore[arg-type]
        assert text.startswith("hello\u00fc")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{% for %}", "line 1"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{{ 'a' * 10 ** 10 }}", "characters"),
    ],
)
async def test_what_is_wrong_with_a_template_is_said(template: str, part: str) -> None:
    async with running_server() as server:
        reply = await ask(server, template)
        assert (reply.status, reply.error["param"]) == (400, "chat_template")
        assert part in reply.error["message"]


async def test_a_rendering_that_is_given_up_answers_nobody_else() -> None:
    async with running_server() as server:
        process = server.frontend.template_process
        process.cpu_limit_s = 1000
        given_up = asyncio.create_task(process.render({"messages": HELLO, "template": ENDLESS}, {}))
        await wait_until_rendering(server)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert await process.render({"messages": HELLO, "template": "next"}, {}) == "next"


async def test_beyond_a_number_of_waiting_templates_more_are_429(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_process, "_MAX_WAITING", 1)
    async with running_server() as server:
        server.frontend.template_process.cpu_limit_s = 1000
        first = ask(server, ENDLESS)
        await wait_until_rendering(server)
        assert (await ask(server, ECHO)).status == 429
        server.frontend.template_process.kill()
        assert (await first).status == 400


async def test_many_empty_messages_are_rendered_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[Any] = []
    original = asyncio.to_thread

    async def to_thread(*args: Any, **kwargs: Any) -> Any:
        threads.append(args)
        return await original(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    async with running_server() as server:
        await server.post("/tokenize", {"messages": [{"role": "user", "content": ""}] * 500})
        assert len(threads) == 1
