# SPDX-License-Identifier: Apache-2.0
"""Results of requests as a caller reads them, and their assembly from the engine's outputs."""

from dataclasses import dataclass, field

from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.parsers.formats import OutputFormat, ToolUse
from pelton.serving.parsers.message import MessageDelta, Parser, PlainParser
from pelton.serving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice."""

    text: str
    """Of a chat: the answer, without the reasoning before it."""
    token_ids: list[int]
    """With the end-of-sequence or stop token, if one ended the output."""
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop string or the token that ended the output."""
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    """What a reasoning model thought, where it was asked in a chat."""
    error: str | None = None
    """With `FinishReason.ERROR`: one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    choices: list[Completion]
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Choice:
    detokenizer: OutputDetokenizer
    parser: Parser
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None


class ResultBuilder:
    """Collects what the engine returns for one request, and cuts it at stop strings."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        output_format: OutputFormat | None = None,
    ) -> None:
        """`output_format`: how to tell reasoning from answers; None: all is text."""
        self.request = request
        self._prompt = prompt
        ids, sampling = request.prompt_token_ids, request.sampling
        use, table = ToolUse(), None
        if output_format is not None and output_format.has_parser(use):
            table = output_format.token_table
        self._choices = [
            _Choice(
                OutputDetokenizer(tokenizer, ids, sampling, table),
                PlainParser()
                if output_format is None or table is None
                else output_format.make_parser(use, ids),
            )
            for _ in range(sampling.n)
        ]
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def is_stopped(self, index: int) -> bool:
        """Whether a stop string ended the choice: the engine would go on with it."""
        return self._choices[index].detokenizer.stop_string is not None

    def push(self, output: RequestOutput) -> MessageDelta:
        """What `output` adds to its choice; nothing once the choice is done."""
        choice = self._choices[output.index]
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if choice.finish_reason is not None:
            return MessageDelta()
        detokenizer = choice.detokenizer
        text = detokenizer.push(output.token_ids, output.finish_reason, output.stop_token_id)
        num_new = detokenizer.num_tokens - len(choice.token_ids)
        choice.token_ids += output.token_ids[:num_new]
        choice.logprobs += (output.logprobs or [])[:num_new]
        choice.finish_reason, choice.stop = output.finish_reason, output.stop_token_id
        choice.error = output.error
        if detokenizer.stop_string is not None:
            choice.finish_reason, choice.stop = FinishReason.STOP, detokenizer.stop_string
        delta = choice.parser.push(text, is_end=choice.finish_reason is not None)
        choice.thoughts.append(delta.reasoning)
        choice.texts.append(delta.content)
        return delta

    def result(self) -> RequestResult:
        """Complete once `is_done`."""
        wants_logprobs = self.request.sampling.logprobs is not None
        completions = []
        for choice in self._choices:
            assert choice.finish_reason is not None, f"{self.request.request_id} is not done"
            completions.append(
                Completion(
                    text="".join(choice.texts),
                    token_ids=choice.token_ids,
                    finish_reason=choice.finish_reason,
                    stop=choice.stop,
                    logprobs=choice.logprobs if wants_logprobs else None,
                    reasoning="".join(choice.thoughts),
                    error=choice.error,
                )
            )
        return RequestResult(
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            choices=completions,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )
