# SPDX-License-Identifier: Apache-2.0
"""Text and messages to token ids. Large ones are worked on in a thread, so that no stream waits."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pelton.core.errors import ContextLengthError, InvalidRequestError
from pelton.serving.http.frontend import Frontend
from pelton.serving.prompt_writer import check_messages

_MAX_INLINE_SIZE = 8192
"""Tokenising so many takes about as long as a step; more goes to a thread."""

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


async def encode_texts(
    frontend: Frontend, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Raises `ContextLengthError` for a text that is far too long, before any work on it."""
    tokenizer, limit = frontend.tokenizer, _max_text_bytes(frontend)
    for text in texts:
        _check_length(text, limit)

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    return await run_by_size(sum(map(len, texts)), encode_all)


async def encode_messages(
    frontend: Frontend,
    messages: list[dict[str, Any]],
    *,
    num_body_bytes: int,
    tools: list[dict[str, Any]] | None = None,
    template: str | None = None,
    variables: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
    response_schema: Any = None,
) -> list[int]:
    """Raises `InvalidRequestError` for messages that are malformed or that the template refuses.
    A template of the request's own is rendered in another process (see `template_process`)."""
    check_messages(messages)
    limit = _max_text_bytes(frontend)
    variables = _free_variables(variables)
    if reasoning_effort is not None:
        variables = {"reasoning_effort": reasoning_effort, **variables}

    def encode(text: str) -> list[int]:
        _check_length(text, limit)
        return frontend.tokenizer.encode(text, add_special_tokens=False)

    writer = frontend.prompt_writer
    if template:
        arguments = {
            "messages": writer.prepare(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "template": template,
        }
        text = await frontend.template_process.render(arguments, variables)
        return await run_by_size(len(text), encode, text)

    def render_and_encode() -> list[int]:
        return encode(
            writer.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                response_schema=response_schema,
                variables=variables,
            )
        )

    # Many empty messages take as long as long ones: all that came counts.
    return await run_by_size(num_body_bytes, render_and_encode)


def _max_text_bytes(frontend: Frontend) -> int:
    return frontend.info.max_model_len * frontend.tokenizer.max_token_bytes


def _check_length(text: str, max_bytes: int) -> None:
    """Tokenising what cannot fit would cost memory and seconds only to be refused."""
    if len(text) > max_bytes:
        raise ContextLengthError(
            f"A text of {len(text)} characters cannot fit the context, which holds at most"
            f" {max_bytes} bytes of text.",
            param="prompt",
        )


async def run_by_size(
    size: int,
    function: Callable[ParamsT, ResultT],
    *args: ParamsT.args,
    **kwargs: ParamsT.kwargs,
) -> ResultT:
    """Calls `function`: in a thread if `size`, in characters or tokens, makes it take long."""
    if size <= _MAX_INLINE_SIZE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _free_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Those that the template may be given; the ones with fields of their own are refused."""
    for name in ("messages", "tools", "template", "add_generation_prompt"):
        if variables and name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {name!r}: it has a field of its own.",
                param="chat_template_kwargs",
            )
    return variables or {}
