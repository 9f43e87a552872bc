# SPDX-License-Identifier: Apache-2.0
"""A request to generate tokens, its sampling parameters, and what comes back for it.

These types cross process borders: plain data, no tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
"""Each costs every step of every choice: a whole vocabulary's would stall and fill a card."""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the context length."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. A value out of range: `InvalidRequestError`.

    The order of effects on the logits: repetition, frequency and presence penalties, logit bias,
    bans (min_tokens), the grammar's mask, temperature, then top-k, top-p and min-p on the tempered
    distribution.
    temperature 0, or top_k 1, takes the highest logit, the lowest id among ties.
    """

    n: int = 1
    max_tokens: int | None = None
    """None: only the context length limits the output."""
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop string ends the output before this many tokens."""
    temperature: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a value in [-100, 100] added to its logit; of at most `MAX_BIASED_TOKENS`."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each position besides the chosen one."""
    prompt_logprobs: int | None = None
    seed: int | None = None
    """None: drawn when the request is made. Each of n choices has its own stream of the seed."""
    grammar: Grammar | None = None
    """What the output must look like. An end-of-sequence token is allowed exactly where the grammar
    may end; max_tokens can still cut the output short."""

    def __post_init__(self) -> None:
        check = _RangeCheck(self)
        check.integer("n", 1, MAX_CHOICES)
        if self.max_tokens is not None:
            check.integer("max_tokens", 1, None)
        check.integer("min_tokens", 0, self.max_tokens)
        check.number("temperature", 0.0, 100.0)
        check.integer("top_k", -1, None)
        check.number("top_p", 0.0, 1.0, open_low=True)
        check.number("min_p", 0.0, 1.0)
        # Below, a logit divided by it may leave float32.
        check.number("repetition_penalty", 0.01, 100.0)
        check.number("presence_penalty", -2.0, 2.0)
        check.number("frequency_penalty", -2.0, 2.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check.integer(name, 0, MAX_LOGPROBS)
        if self.seed is not None:
            check.integer("seed", -(2**63), 2**63 - 1)
        limits = {"logit_bias": MAX_BIASED_TOKENS, "stop_token_ids": MAX_STOP_TOKENS}
        for name, limit in limits.items():
            if (count := len(getattr(self, name))) > limit:
                raise InvalidRequestError(
                    f"{name} takes at most {limit} tokens, got {count}.", param=name
                )
        for value in self.logit_bias.values():
            if not (math.isfinite(value) and -100 <= value <= 100):
                raise InvalidRequestError(
                    f"logit_bias values must be between -100 and 100, got {value}.",
                    param="logit_bias",
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.",
                param="stop",
            )
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop strings must not be empty.", param="stop")
        if self.grammar is not None and self.min_tokens:
            raise InvalidRequestError(
                f"min_tokens cannot be combined with {self.grammar.param}, which decides where the"
                " output may end: leave min_tokens out.",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


class _RangeCheck:
    """Range checks whose messages name the field, the allowed values and the value given."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self._params, name)
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value > high):
            raise InvalidRequestError(
                f"{name} must be an integer {allowed}, got {value!r}.", param=name
            )

    def number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self._params, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            is_number
            and math.isfinite(value)
            and low <= value <= high
            and not (open_low and value == low)
        ):
            return
        allowed = (
            f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        )
        raise InvalidRequestError(f"{name} must be a number {allowed}, got {value!r}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSource:
    """A worker that computes prompts for others."""

    address: str
    min_tokens: int
    """With fewer tokens left after cached blocks, a prompt is computed where it is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue. Owned by whoever made it until `Engine.add` takes it.

    `request_id` is unique among live requests and stays the same in every process.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    """The resolved seed: `sampling.seed`, or one drawn by whoever made the request."""
    priority: int = 0
    """Lower runs first."""
    deadline_s: float | None = None
    """Absolute, on the host's monotonic clock (`core.clock`). None: no deadline."""
    cache_salt: str = ""
    """Requests with different salts never share cached blocks."""
    prefill_at: PrefillSource | None = None
    """Who computes the prompt. None: the engine that has the request."""
    is_prefill_only: bool = False
    """Nothing is generated: the KV of the prompt, all but its last token, is for the owner of the
    lease that has this request's id."""
    resumed: Mapping[int, list[int]] = field(default_factory=dict)
    """Where another worker lost the request: the choices that have not ended, by index, and the
    output tokens that each has; outputs bring what follows these. Empty: from the start."""
    traceparent: str = ""
    """The W3C trace context that the request's phases are reported for; empty: it is not traced."""

    @property
    def choices(self) -> Sequence[int]:
        """Indices of the choices to run, in order."""
        return sorted(self.resumed) or range(self.sampling.n)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: natural log, before any sampling control."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: list[tuple[int, float]]
    """(token id, logprob) of the likeliest tokens, best first."""


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one choice of a request. The last one carries a finish reason.

    Nobody changes one once made. It is not frozen because one is made for every token, and a
    frozen dataclass takes five times as long to make.
    """

    request_id: str
    index: int
    """Which of the request's n choices."""
    token_ids: list[int]
    """New tokens only. An end-of-sequence or stop token is included as the last one."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids` when the request asked for logprobs."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """For every prompt position (None for the first), once, with the first output of choice 0."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the output when the reason is STOP."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    error: str | None = None
    """With `FinishReason.ERROR`: one sentence."""
    error_code: str | None = None
    """The `code` of the `core.errors` class that the error stands for."""
    num_drafts: int = 0
    """Tokens that were guessed and verified in this step."""
    num_accepted_drafts: int = 0
    """How many of them were right and are among `token_ids`."""
