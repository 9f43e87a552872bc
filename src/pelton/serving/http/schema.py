# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests and responses, as structs: the decoder and the OpenAPI document both come
from them.

A field that a request leaves out or sends as null takes its default. Limits that depend on the
model (token ids, lengths) are checked later; those that are `SamplingParams`'s are repeated here
because a schema that does not state them would be no use to a client.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pelton.core.request import (
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from pelton.serving.router.types import Decision

_INT32_MAX = 2**31 - 1
MAX_TIMEOUT_S = 86400.0

Count = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """A last event with the token counts."""
    continuous_usage_stats: bool | None = None
    """The counts so far in every event."""


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Tokens in an event after the first token, which goes out at once."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: CountOrZero | None = None
    min_tokens: CountOrZero | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    """Token id, written as a string, to what is added to its logit."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    """Lower runs first."""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Deadline, counted from arrival; the server's own when left out."""
    cache_salt: Name | None = None
    """Requests with different salts never share cached prefixes."""
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema that the output follows."""
    guided_regex: str | None = None
    """A regular expression (Rust's syntax) that the whole output matches."""
    guided_choice: list[str] | None = None
    """Texts of which the output is one."""
    guided_grammar: str | None = None
    """A Lark grammar with the rule `start`."""


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """low, medium or high, for models that are told how long to reason."""
    chat_template: str | None = None
    """A jinja template that replaces the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Of the Responses API. Nothing is stored, whatever `store` says."""

    model: Name | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    truncation: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    cache_salt: Name | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: NumTop | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]


class TokenizeResponse(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    """Drafts of speculative decoding that became output."""
    rejected_prediction_tokens: int
    """Drafts that did not; they are not among the completion tokens."""


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Where there was reasoning, or tokens were drafted."""


class OutputTokensDetails(msgspec.Struct, omit_defaults=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    """Where tokens were drafted; OpenAI's Responses API has no such fields. As for completions."""
    rejected_prediction_tokens: int | None = None


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    """Items of type reasoning, message and function_call."""
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    metadata: dict[str, Any]
    usage: ResponsesUsage | None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON."""


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


FinishReasonText = Literal["stop", "length", "tool_calls"]


class ChatChoice(msgspec.Struct, omit_defaults=True):
    index: int
    message: AssistantMessage
    finish_reason: FinishReasonText
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, omit_defaults=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallChunk(msgspec.Struct, omit_defaults=True):
    """The first one of a call has its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChatChunkChoice(msgspec.Struct, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: FinishReasonText | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, omit_defaults=True):
    """One streamed event of a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """In the first event, when the request asks for token ids."""


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    index: int
    text: str
    finish_reason: FinishReasonText | None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, omit_defaults=True):
    """A completion, and (with fewer fields filled) one streamed event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    config: dict[str, Any] | None = None
    """The engine's resolved configuration: a measurement over HTTP records what it measured."""
    config_hash: str | None = None


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Status(msgspec.Struct):
    status: str
    """`ok` or `ready`; `degraded` while some of the workers take no requests."""
    workers: int
    workers_up: int


class RouteCard(msgspec.Struct):
    """Which worker took a request, and why."""

    request_id: str
    worker: str
    generation: int
    policy: str
    cached_tokens: int | None
    """Prompt tokens that the worker was believed to have cached. Null where that is not followed:
    with one worker, or another policy than kv-aware."""
    reason: str
    scores: dict[str, float]
    """Of the workers that were compared; the lowest is best."""
    frontend: int = 0
    """Which of the server's frontends decided."""

    @classmethod
    def of(cls, decision: Decision, frontend: int) -> "RouteCard":
        return cls(
            decision.request_id,
            decision.worker_id,
            decision.generation,
            decision.policy.value,
            decision.cached_tokens,
            decision.reason,
            decision.scores,
            frontend,
        )


class RouteList(msgspec.Struct):
    object: Literal["list"]
    data: list[RouteCard]
    """The newest of each frontend last."""


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody
