# SPDX-License-Identifier: Apache-2.0
"""The engine as a Python object: prompts in, completions out.

from pelton import LLM, SamplingParams

with LLM("smollm2") as llm:
    [result] = llm.chat(
        [{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=64)
    )
    print(result.choices[0].text)
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from pelton.core.config import EngineConfig
from pelton.core.env import let_waiting_threads_sleep
from pelton.core.errors import InvalidRequestError
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.engine_options import make_engine_config
from pelton.serving.local_engine import LocalEngine
from pelton.serving.parsers.formats import OutputFormat, ToolUse
from pelton.serving.parsers.message import MessageDelta
from pelton.serving.progress import show_progress
from pelton.serving.prompt_writer import PromptWriter, check_messages
from pelton.serving.results import RequestResult, ResultBuilder
from pelton.serving.tokenizer import Tokenizer

Prompts: TypeAlias = str | list[str] | list[int] | list[list[int]]
Conversation: TypeAlias = Sequence[Mapping[str, Any]]


class LLM:
    """Owns an engine in this process. Make calls one by one; a call that is interrupted leaves
    the engine ready for the next."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """`options` are settings of `EngineConfig` by name, such as `dtype="float32"` or
        `max_num_requests=8`. Raises `CheckpointError`, `CapacityError` or `ConfigError`."""
        self._load(make_engine_config(model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Raises what making an `LLM` does."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: EngineConfig) -> None:
        let_waiting_threads_sleep()
        from pelton.engine.factory import make_engine

        checkpoint = open_checkpoint(config.model.model)
        tokenizer = Tokenizer.load(checkpoint)
        engine = make_engine(
            config,
            load_vocabulary=lambda geometry: tokenizer.vocabulary(
                geometry.eos_token_ids, geometry.vocab_size
            ),
        )
        self._set_up(engine, checkpoint)

    @classmethod
    def from_engine(cls, engine: Engine, checkpoint: Checkpoint) -> Self:
        """An engine that was built elsewhere, with the tokenizer and template of `checkpoint`."""
        llm = cls.__new__(cls)
        llm._set_up(engine, checkpoint)
        return llm

    def _set_up(self, engine: Engine, checkpoint: Checkpoint) -> None:
        self.tokenizer = Tokenizer.load(checkpoint, engine.geometry.vocab_size)
        template = ChatTemplate(checkpoint.chat_template, self.tokenizer.special_tokens)
        self._format = OutputFormat("auto", "auto", template.source, self.tokenizer)
        self._writer = PromptWriter(template, self._format)
        self._local = LocalEngine(engine)
        self._seeds = random.Random(engine.config.model.seed)
        self._request_numbers = itertools.count()

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self._local.engine.config

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestResult]:
        """Continues each prompt: a text, token ids, or a list of either; results in their order.

        `sampling`: one for all, or one for each prompt. Raises `InvalidRequestError`, and then
        nothing was generated.
        """
        items = _as_list(prompts)
        params = _one_each(sampling, len(items))
        return self._run(
            [self._builder(*pair) for pair in zip(items, params, strict=True)], progress
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        progress: bool = True,
        **template_variables: Any,
    ) -> list[RequestResult]:
        """Answers one conversation or several; messages are OpenAI's (`role`, `content`). What a
        reasoning model thinks first is apart, and a grammar holds after it."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one or not messages else messages
        params = _one_each(sampling, len(conversations))
        texts = [
            self._render(item, tools=tools, template=template, variables=template_variables)
            for item in conversations
        ]
        builders = [
            self._builder(text, each, is_chat=True)
            for text, each in zip(texts, params, strict=True)
        ]
        return self._run(builders, progress)

    def stream_chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        on_done: Callable[[RequestResult], None] | None = None,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Iterator[str]:
        """The answer's text as it is made; `on_reasoning` gets what is thought before it, and
        `on_done` the result at its end. Ctrl-C raises `KeyboardInterrupt` and, like closing the
        iterator, ends the request."""
        params = sampling or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError("n must be 1 to stream one answer.", param="n")
        builder = self._builder(self._render(messages), params, is_chat=True)
        with closing(self._local.run([builder.request])) as steps:
            for outputs in steps:
                for output in outputs:
                    delta = self._push(builder, output)
                    if delta.reasoning and on_reasoning is not None:
                        on_reasoning(delta.reasoning)
                    if delta.content:
                        yield delta.content
        if on_done is not None:
            on_done(builder.result())

    def encode_chat(self, messages: Conversation, **template_variables: Any) -> list[int]:
        """The token ids of the prompt that `chat` would continue."""
        text = self._render(messages, variables=template_variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Frees the engine's memory. Idempotent."""
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _render(self, messages: Conversation, **options: Any) -> str:
        check_messages(messages)
        return self._writer.render(messages, **options)

    def _builder(
        self, prompt: str | list[int], sampling: SamplingParams, *, is_chat: bool = False
    ) -> ResultBuilder:
        # A chat template writes the beginning-of-sequence token itself.
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt, not is_chat) if isinstance(prompt, str) else prompt
        if is_chat:
            sampling = self._for_chat(sampling, ids)
        if sampling.grammar is not None:
            self._local.engine.compile_grammar(sampling.grammar)
        request = GenerateRequest(
            request_id=f"local-{next(self._request_numbers)}",
            prompt_token_ids=list(ids),
            sampling=sampling,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
        )
        return ResultBuilder(request, text, self.tokenizer, self._format if is_chat else None)

    def _for_chat(self, sampling: SamplingParams, prompt_token_ids: list[int]) -> SamplingParams:
        """Ends at what ends a message of this model; its grammar waits for the reasoning."""
        ends = () if sampling.ignore_eos else self._format.stop_token_ids
        grammar = self._format.make_grammar(ToolUse(), sampling.grammar, prompt_token_ids)
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends), grammar=grammar)

    def _run(self, builders: list[ResultBuilder], progress: bool) -> list[RequestResult]:
        by_id = {builder.request.request_id: builder for builder in builders}
        requests = [builder.request for builder in builders]
        with (
            show_progress(len(builders), is_shown=progress) as advance,
            closing(self._local.run(requests)) as steps,
        ):
            for outputs in steps:
                num_tokens = num_done = 0
                for output in outputs:
                    builder = by_id[output.request_id]
                    was_done = builder.is_done
                    self._push(builder, output)
                    num_tokens += len(output.token_ids)
                    num_done += builder.is_done and not was_done
                advance(num_done, num_tokens)
        return [builder.result() for builder in builders]

    def _push(self, builder: ResultBuilder, output: RequestOutput) -> MessageDelta:
        """Adds `output`; ends its choice in the engine once a stop string has ended it."""
        was_stopped = builder.is_stopped(output.index)
        delta = builder.push(output)
        if builder.is_stopped(output.index) and not was_stopped:
            self._local.cancel(builder.request.request_id, output.index)
        return delta


def _as_list(prompts: Prompts) -> list[Any]:
    """The prompts, each a text or a list of ids."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and _is_ids(items):
        return [items]
    if not all(isinstance(item, str) or _is_ids(item) for item in items):
        raise InvalidRequestError(
            "prompts must be a text, a list of token ids, or a list of either.", param="prompt"
        )
    return items


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InvalidRequestError(
            f"sampling must be one SamplingParams or one for each of the {count} prompts, got "
            f"{len(sampling)}.",
            param="sampling",
        )
    return sampling
