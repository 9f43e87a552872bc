# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: messages to one request, its choices and the shape of the reply."""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar, GrammarKind
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.validation import check_prompt_length
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.http.choice import Choice
from pelton.serving.http.formats import ChatFormat, ReplyFormat
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.grammars import check_grammar, read_grammar
from pelton.serving.http.prompts import encode_messages
from pelton.serving.http.replies import Exchange
from pelton.serving.http.sampling import make_sampling
from pelton.serving.http.schema import ChatRequest, GenerationFields
from pelton.serving.http.stream import GenerationReply, ReplyOptions
from pelton.serving.parsers.formats import ToolUse, read_tools


async def answer_chat(frontend: Frontend, exchange: Exchange, body: ChatRequest) -> GenerationReply:
    return await reply_to_chat(frontend, exchange, body, ChatFormat, "chatcmpl-")


async def reply_to_chat(
    frontend: Frontend,
    exchange: Exchange,
    body: ChatRequest,
    make_format: Callable[..., ReplyFormat],
    id_prefix: str,
    format_param: str = "response_format",
) -> GenerationReply:
    """`make_format` takes what `ChatFormat` does; errors call `response_format` `format_param`."""
    frontend.check_model(body.model)
    frontend.check_room(priority=body.priority or 0)  # before the work of tokenising
    info, output_format = frontend.info, frontend.output_format
    wanted = read_grammar(body, format_param)
    use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    output_format.check(use)
    sampling = _read_sampling(frontend, body)
    with exchange.span("tokenise"):
        prompt = await encode_messages(
            frontend,
            body.messages,
            num_body_bytes=exchange.num_body_bytes,
            tools=body.tools or None,
            template=body.chat_template,
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
            reasoning_effort=body.reasoning_effort,
            response_schema=_schema_of(wanted),
        )
    check_prompt_length(len(prompt), info.max_model_len)
    grammar = output_format.make_grammar(use, wanted, prompt)
    if grammar is not None:
        await check_grammar(frontend, grammar)
        sampling = replace(sampling, grammar=grammar)
    deadline_s = get_deadline(frontend, exchange, body)
    request = GenerateRequest(
        request_id=id_prefix + secrets.token_hex(12),
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=get_seed(body),
        priority=body.priority or 0,
        deadline_s=deadline_s,
        cache_salt=body.cache_salt or "",
    )
    reply_format = make_format(
        request.request_id,
        frontend.served_name,
        int(time.time()),
        frontend.tokenizer,
        has_logprobs=bool(body.logprobs),
        has_token_ids=bool(body.return_token_ids),
    )
    choices = _make_choices(frontend, request, use, keeps_token_ids=bool(body.return_token_ids))
    options = get_reply_options(frontend, body)
    return GenerationReply(
        frontend, exchange, [request], choices, reply_format, options, deadline_s
    )


def _read_sampling(frontend: Frontend, body: ChatRequest) -> SamplingParams:
    has_logprobs = bool(body.logprobs)
    if body.top_logprobs and not has_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    # Tokens that end a message, whether or not the model's configuration lists them as ends.
    ends = () if body.ignore_eos else frontend.output_format.stop_token_ids
    return make_sampling(
        body,
        frontend.info.vocab_size,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        stop_token_ids=ends,
    )


def _schema_of(wanted: Grammar | None) -> Any:
    """For prompts that tell the model its schema."""
    is_schema = wanted is not None and wanted.kind is GrammarKind.JSON_SCHEMA
    return json.loads(wanted.text) if wanted is not None and is_schema else None


def _make_choices(
    frontend: Frontend, request: GenerateRequest, use: ToolUse, *, keeps_token_ids: bool
) -> list[Choice]:
    output_format, prompt = frontend.output_format, request.prompt_token_ids
    has_parser = output_format.has_parser(use)
    table = output_format.token_table if has_parser else None
    return [
        Choice(
            index,
            request,
            OutputDetokenizer(frontend.tokenizer, prompt, request.sampling, table),
            keeps_token_ids=keeps_token_ids,
            parser=output_format.make_parser(use, prompt) if has_parser else None,
        )
        for index in range(request.sampling.n)
    ]


def get_seed(body: GenerationFields) -> int:
    return secrets.randbits(63) if body.seed is None else body.seed


def get_deadline(frontend: Frontend, exchange: Exchange, body: GenerationFields) -> float:
    return exchange.arrival_s + (body.timeout_s or frontend.config.request_timeout_s)


def get_reply_options(frontend: Frontend, body: GenerationFields) -> ReplyOptions:
    stream_options = body.stream_options
    return ReplyOptions(
        is_streamed=bool(body.stream),
        stream_interval=body.stream_interval or frontend.config.stream_interval,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
    )
