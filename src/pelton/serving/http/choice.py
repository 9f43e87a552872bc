# SPDX-License-Identifier: Apache-2.0
"""One choice of a reply: what it has so far, and what of it has not been written yet."""

from pelton.core.request import GenerateRequest, RequestOutput, TokenLogprobs
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.parsers.message import MessageBuilder, MessageDelta, Parser


class Choice:
    """Grows by `take`; a streaming writer empties it with `flush` from time to time."""

    __slots__ = (
        "_detokenizer",
        "_drops_output",
        "_is_opened",
        "_keeps_token_ids",
        "_parser",
        "delta",
        "finish_reason",
        "index",
        "logprobs",
        "message",
        "num_accepted_drafts",
        "num_cached_tokens",
        "num_drafts",
        "num_pending_tokens",
        "num_reasoning_tokens",
        "num_tokens",
        "prompt_logprobs",
        "prompt_token_ids",
        "raw_text",
        "text",
        "text_offset",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        detokenizer: OutputDetokenizer,
        *,
        keeps_token_ids: bool,
        echoed_text: str = "",
        drops_output: bool = False,
        parser: Parser | None = None,
    ) -> None:
        """`drops_output`: the request wanted no output; one token is made and left out. With a
        `parser`, `text` stays empty: what it makes of the text is in `delta` and `message`."""
        self.index = index
        self.prompt_token_ids = request.prompt_token_ids
        self.num_tokens = 0
        """Output tokens so far, written or not."""
        self.num_cached_tokens = 0
        self.num_drafts = 0
        """Tokens guessed and verified in the engine."""
        self.num_accepted_drafts = 0
        self.finish_reason: str | None = None
        self.text = echoed_text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.text_offset = 0
        """Characters of log-probability tokens written before: the writer's to keep."""
        self.num_pending_tokens = 0
        """Tokens taken since the last flush."""
        self._detokenizer = detokenizer
        self._keeps_token_ids = keeps_token_ids
        self._drops_output = drops_output
        self._is_opened = False
        self._parser = parser
        self.delta = MessageDelta()
        """What the parser made of the text since the last flush."""
        self.message = MessageBuilder() if parser is not None else None
        """What it made of all of it."""
        self.raw_text = ""
        """All of the text, where there is a parser."""
        self.num_reasoning_tokens = 0

    @property
    def num_broken_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_broken

    @property
    def raw_content(self) -> str:
        """The text as the model wrote it, without its reasoning."""
        text = self.raw_text
        for marker in ("</think>", "<|message|>"):
            text = text.rpartition(marker)[2]
        return text.lstrip("\n") if text != self.raw_text else text

    def take(self, output: RequestOutput) -> None:
        """Adds what a step made. A stop string in the text finishes the choice; it ignores what
        comes after that."""
        if self.finish_reason is not None:
            return
        if output.num_drafts:
            self.num_drafts += output.num_drafts
            self.num_accepted_drafts += output.num_accepted_drafts
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._drops_output:
            self.finish_reason = "length"
            return
        detokenizer, token_ids = self._detokenizer, output.token_ids
        logprobs, finish_reason = output.logprobs, output.finish_reason
        text = detokenizer.push(token_ids, finish_reason, output.stop_token_id)
        if finish_reason is not None:
            self.finish_reason = finish_reason.value
        if detokenizer.stop_string is not None:
            num_kept = detokenizer.num_tokens - self.num_tokens
            token_ids = token_ids[:num_kept]
            logprobs = logprobs[:num_kept] if logprobs is not None else None
            self.finish_reason = "stop"
        if self._parser is None:
            self.text += text
        else:
            self._parse(text, self._parser, len(token_ids))
        self.num_tokens += len(token_ids)
        self.num_pending_tokens += len(token_ids)
        if self._keeps_token_ids:
            self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs += logprobs

    def _parse(self, text: str, parser: Parser, num_tokens: int) -> None:
        assert self.message is not None
        is_end = self.finish_reason is not None
        if not text and not is_end:
            return
        self.raw_text += text
        delta = parser.push(text, is_end)
        if delta.reasoning and not delta.content:
            self.num_reasoning_tokens += num_tokens
        self.delta.extend(delta)
        self.message.add(delta)
        if self.finish_reason == "stop" and parser.num_calls and not parser.num_broken:
            self.finish_reason = "tool_calls"

    def is_due(self, stream_interval: int) -> bool:
        """Whether a stream writes an event now: at the first text, then every so many tokens."""
        if self.finish_reason is not None:
            return True
        if not self.text and not self.delta:
            return False
        return not self._is_opened or self.num_pending_tokens >= stream_interval

    def flush(self) -> None:
        """Forgets what has been written."""
        self._is_opened = True
        self.num_pending_tokens = 0
        self.text = ""
        if self._parser is not None:
            self.delta = MessageDelta()
        if self.token_ids:
            self.token_ids = []
        if self.logprobs or self.prompt_logprobs:
            self.logprobs = []
            self.prompt_logprobs = []

    @property
    def is_opened(self) -> bool:
        """Whether an event of this choice has been written."""
        return self._is_opened
