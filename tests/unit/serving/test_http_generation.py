# SPDX-License-Identifier: Apache-2.0
"""Replies: chat and completions, streamed and whole, must carry the same thing."""

from typing import Any

import msgspec
import pytest
from in_memory import Reply, Server, load_text_side, make_engine, running_server

from pelton.serving.http import schema
from pelton.serving.stand_in import StandInEngine

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
PATHS = [(CHAT, {"messages": HELLO}), (COMPLETE, {"prompt": "hello"})]


def joined_text(reply: Reply, index: int = 0) -> str:
    """The text of one choice of a stream."""
    pieces = []
    for event in reply.events:
        for choice in event["choices"]:
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"]["content"])
    return "".join(pieces)


def whole_text(reply: Reply, index: int = 0) -> str:
    choice = reply.json["choices"][index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


async def ask_both(server: Server, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
    body = {"seed": 7, "max_tokens": 12, **body}
    whole = await server.post(path, body)
    return whole, await server.post(path, {**body, "stream": True})


@pytest.mark.parametrize(("path", "prompt"), PATHS)
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stream_interval": 5}, {"skip_special_tokens": False}], ids=str
)
async def test_stream_adds_up_to_the_whole_reply(
    path: str, prompt: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with running_server() as server:
        whole, stream = await ask_both(server, path, {**prompt, **fields})
        for index in range(fields.get("n", 1)):
            assert joined_text(stream, index) == whole_text(whole, index)


async def test_text_is_the_decoding_of_the_returned_token_ids() -> None:
    async with running_server() as server:
        whole, stream = await ask_both(server, CHAT, {"messages": HELLO, "return_token_ids": True})
        ids = whole.json["choices"][0]["token_ids"]
        streamed = [i for e in stream.events for c in e["choices"] for i in c.get("token_ids", [])]
        assert streamed == ids
        assert load_text_side()[0].decode(ids) == whole_text(whole)


async def test_prompt_token_ids_come_with_the_first_event_only() -> None:
    async with running_server() as server:
        whole, stream = await ask_both(server, CHAT, {"messages": HELLO, "return_token_ids": True})
        with_prompt = [event.get("prompt_token_ids") for event in stream.events]
        assert with_prompt[0] == whole.json["prompt_token_ids"]
        assert not any(with_prompt[1:])


async def test_chat_stream_opens_with_the_role_only() -> None:
    async with running_server() as server:
        _, stream = await ask_both(server, CHAT, {"messages": HELLO})
        first = stream.events[0]["choices"][0]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert first["finish_reason"] is None


async def test_every_event_is_one_line_of_the_documented_schema() -> None:
    async with running_server() as server:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        _, stream = await ask_both(
            server, CHAT, {**body, "stream_options": {"include_usage": True}}
        )
        for frame in stream.body.decode().split("\n\n")[:-2]:
            assert "\n" not in frame
            msgspec.json.decode(frame.removeprefix("data: "), type=schema.ChatChunk)


async def test_finish_reason_comes_exactly_once_a_choice() -> None:
    async with running_server() as server:
        _, stream = await ask_both(server, COMPLETE, {"prompt": "a", "n": 2})
        reasons = [c["finish_reason"] for e in stream.events for c in e["choices"]]
        assert [reason for reason in reasons if reason] == ["length", "length"]


async def test_usage_event_is_last_and_equals_the_whole_replys() -> None:
    async with running_server() as server:
        whole, stream = await ask_both(
            server, CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}
        )
        assert stream.events[-1]["choices"] == []
        assert stream.events[-1]["usage"] == whole.json["usage"]


async def test_usage_counts_prompt_output_and_cached_tokens() -> None:
    async with running_server() as server:
        reply = await server.post(COMPLETE, {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2})
        assert reply.json["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_continuous_usage_grows_with_the_output() -> None:
    async with running_server() as server:
        options = {"continuous_usage_stats": True}
        _, stream = await ask_both(server, COMPLETE, {"prompt": "a", "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in stream.events]
        assert counts == sorted(counts)
        assert counts[-1] == 12


async def test_stream_interval_holds_back_all_but_the_first_token() -> None:
    async with running_server() as server:
        body = {"prompt": "a", "max_tokens": 11, "stream": True, "stream_interval": 5}
        reply = await server.post(COMPLETE, {**body, "return_token_ids": True, "seed": 1})
        sizes = [len(event["choices"][0]["token_ids"]) for event in reply.events]
        assert sizes == [1, 5, 5]


@pytest.mark.parametrize(
    "prompt", ["hello there", ["hello there"], [28120, 665], [[28120, 665]]], ids=str
)
async def test_prompt_may_have_four_shapes(prompt: Any) -> None:
    async with running_server() as server:
        reply = await server.post(COMPLETE, {"prompt": prompt, "max_tokens": 1, "echo": True})
        assert whole_text(reply).startswith("hello there")


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    async with running_server() as server:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "echo": True}
        reply = await server.post(COMPLETE, body)
        starts = [(c["index"], c["text"][0]) for c in reply.json["choices"]]
        assert starts == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


async def test_echo_without_output_scores_the_prompt() -> None:
    async with running_server() as server:
        body = {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
        reply = await server.post(COMPLETE, body)
        choice = reply.json["choices"][0]
        assert choice["text"] == "hello there"
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
        assert reply.json["usage"]["completion_tokens"] == 0


async def test_chat_logprobs_have_openais_shape() -> None:
    async with running_server() as server:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
        reply = await server.post(CHAT, body)
        entries = reply.json["choices"][0]["logprobs"]["content"]
        assert len(entries) == 3
        assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
        assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -1.5]


async def test_completion_logprobs_are_the_same_streamed() -> None:
    async with running_server() as server:
        whole, stream = await ask_both(server, COMPLETE, {"prompt": "a", "logprobs": 1})
        expected = whole.json["choices"][0]["logprobs"]
        for name, values in expected.items():
            pieces = [event["choices"][0]["logprobs"][name] for event in stream.events]
            assert [value for piece in pieces for value in piece] == values


@pytest.mark.parametrize(("path", "prompt"), PATHS)
async def test_stop_string_ends_text_tokens_and_the_request(
    path: str, prompt: dict[str, Any]
) -> None:
    async with running_server() as server:
        base = {**prompt, "seed": 3, "max_tokens": 40, "return_token_ids": True}
        text = whole_text(await server.post(path, base))
        stop = text[len(text) // 2 :][:4]
        expected = text[: text.index(stop)]
        whole, stream = await ask_both(server, path, {**base, "stop": stop})
        assert whole_text(whole) == joined_text(stream) == expected
        assert whole.json["choices"][0]["finish_reason"] == "stop"
        assert (
            len(whole.json["choices"][0]["token_ids"]) == (whole.json["usage"]["completion_tokens"])
        )
        assert not server.engine.has_work


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_a_stop_string_ended_computes_nothing_more(stream: bool) -> None:
    async with running_server() as server:
        base = {"prompt": "hello", "n": 2, "seed": 3, "max_tokens": 200}
        stop = whole_text(await server.post(COMPLETE, base), 1)[:12]
        num_before = server.engine.stats().generated_tokens_total
        reply = await server.post(COMPLETE, {**base, "stop": stop, "stream": stream})
        assert (joined_text(reply, 1) if stream else whole_text(reply, 1)) == ""
        assert server.engine.stats().generated_tokens_total - num_before < 250


class ScriptedEngine(StandInEngine):
    """Says what it is told to."""

    script: tuple[int, ...] = ()

    def _token_at(self, choice: Any) -> int:
        return self.script[choice.num_generated]


async def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    text = "né 日本 🙂"
    ids = load_text_side()[0].encode(text)
    engine = make_engine()
    scripted = ScriptedEngine(engine.base_config, engine.options)
    scripted.script = tuple(ids)
    async with running_server(engine=scripted) as server:
        reply = await server.post(COMPLETE, {"prompt": "a", "max_tokens": len(ids), "stream": True})
        assert joined_text(reply) == text
        assert len(reply.events) < len(ids)
        assert all("\ufffd" not in event["choices"][0]["text"] for event in reply.events)


async def test_seeded_requests_repeat_and_unseeded_ones_differ() -> None:
    async with running_server() as server:
        seeds = [4, 4, None, None]
        texts = [
            whole_text(await server.post(COMPLETE, {"prompt": "a", "seed": seed})) for seed in seeds
        ]
        assert texts[0] == texts[1]
        assert texts[2] != texts[3]


async def test_tools_reach_the_template_when_no_call_may_come() -> None:
    template = "{{ tools[0].name }}"
    async with running_server() as server:
        body = {
            "messages": HELLO,
            "tools": [{"name": "hello"}],
            "tool_choice": "none",
            "chat_template": template,
            "return_token_ids": True,
            "max_tokens": 1,
        }
        reply = await server.post(CHAT, body)
        assert load_text_side()[0].decode(reply.json["prompt_token_ids"]) == "hello"


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with running_server() as server:
        reply = await server.post("/tokenize", {"prompt": "hello there"})
        assert reply.json == {"tokens": [28120, 665], "count": 2, "max_model_len": 8192}
        back = await server.post("/detokenize", {"tokens": reply.json["tokens"]})
        assert back.json == {"prompt": "hello there"}


async def test_tokenize_counts_what_chat_will_use() -> None:
    async with running_server() as server:
        counted = await server.post("/tokenize", {"messages": HELLO})
        used = await server.post(CHAT, {"messages": HELLO, "max_tokens": 1})
        assert counted.json["count"] == used.json["usage"]["prompt_tokens"]
