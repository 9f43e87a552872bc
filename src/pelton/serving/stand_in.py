# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for tests and for measuring everything around the engine.

It is chosen by a model name of its own, which nothing documents for users:

    stand-in:MODEL?step_ms=5&max_model_len=8192

MODEL lends the tokenizer and the chat template to the frontend; no weights are read. Each step
gives every running request one token, a fixed function of its seed, choice and position, after
`step_ms` milliseconds. It schedules nothing and keeps no KV: blocks in its statistics are what the
live requests would hold. With `scheduled=1` the real engine runs instead, with its scheduler, its
blocks and its prefix cache, on an executor that computes nothing.
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from pelton.core.clock import MonotonicClock
from pelton.core.config import EngineConfig
from pelton.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from pelton.core.stats import EngineStats, PrefillLoad
from pelton.core.trace import Phase

if TYPE_CHECKING:
    from pelton.engine.engine import Engine

STAND_IN_SCHEME = "stand-in:"
_FIRST_TOKEN_ID = 300
"""Above the special tokens and single bytes of the vocabularies in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInOptions:
    model: str
    step_ms: float = 0.0
    max_model_len: int = 8192
    vocab_size: int = 49152
    num_blocks: int = 65536
    max_num_requests: int = 4096
    scheduled: int = 0
    """1: the real engine over `engine.stand_in.StandInExecutor`."""


def parse_stand_in(model: str) -> StandInOptions:
    """Options of a `stand-in:` model name; unknown or malformed ones are a `ConfigError`."""
    name, _, query = model.removeprefix(STAND_IN_SCHEME).partition("?")
    types = {"step_ms": float}
    try:
        options: dict[str, Any] = {
            key: types.get(key, int)(value) for key, value in parse_qsl(query)
        }
        return StandInOptions(model=name, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Stand-in options {query!r} are not usable: {error}.") from error


def make_stand_in(config: EngineConfig) -> "StandInEngine":
    return StandInEngine(config, parse_stand_in(config.model.model))


def make_scheduled_stand_in(config: EngineConfig, options: StandInOptions) -> "Engine":
    """The real engine on an executor without a model."""
    from pelton.engine.engine import Engine
    from pelton.engine.resolve import resolve
    from pelton.engine.stand_in import StandInExecutor

    engine = StandInEngine(config, options)
    resolved = resolve(
        engine.config,
        engine.geometry,
        kv_bytes_available=2**40,
        device="cpu",
        element_bytes=4,
    )
    executor = StandInExecutor(options.vocab_size, options.step_ms / 1000)
    return Engine(resolved, engine.geometry, executor, MonotonicClock())


@dataclass(slots=True)
class _Choice:
    request: GenerateRequest
    index: int
    max_tokens: int
    num_generated: int = 0


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass(slots=True)
class StandInEngine:
    """Stands in for `engine.Engine` towards the worker loop. Choices that finish leave at once."""

    base_config: EngineConfig
    options: StandInOptions
    _choices: list[_Choice] = field(default_factory=list)
    _totals: _Totals = field(default_factory=_Totals)
    _last_step_s: float = 0.0
    _batch_rows: int = 0

    @property
    def config(self) -> EngineConfig:
        base, options = self.base_config, self.options
        return EngineConfig(
            model=dataclasses.replace(base.model, max_model_len=options.max_model_len),
            cache=dataclasses.replace(
                base.cache,
                num_blocks=options.num_blocks,
                prefix_cache=base.cache.prefix_cache and bool(options.scheduled),
            ),
            scheduler=dataclasses.replace(
                base.scheduler, max_num_requests=options.max_num_requests
            ),
            executor=base.executor,
        )

    @property
    def geometry(self) -> ModelGeometry:
        return ModelGeometry(
            name="stand-in",
            architecture="stand-in",
            num_layers=1,
            hidden_size=1,
            num_heads=1,
            vocab_size=self.options.vocab_size,
            max_context=self.options.max_model_len,
            num_parameters=0,
            kv_groups=(KVGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=1),),
            bos_token_id=None,
            eos_token_ids=(),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._choices)

    @property
    def is_starved(self) -> bool:
        return False

    def add(self, request: GenerateRequest) -> None:
        num_prompt, limit = len(request.prompt_token_ids), self.options.max_model_len
        if num_prompt == 0:
            raise InvalidRequestError("The prompt must hold at least one token.", param="prompt")
        if num_prompt >= limit:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens; the model takes at most {limit - 1}.",
                param="prompt",
            )
        if request.sampling.grammar is not None:
            raise InvalidRequestError(
                "A stand-in has no model whose output could follow a grammar.", param="grammar"
            )
        max_tokens = min(request.sampling.max_tokens or limit, limit - num_prompt)
        self._choices += [
            _Choice(request, index, max_tokens, len(request.resumed.get(index, ())))
            for index in request.choices
        ]
        self._totals.prompt_tokens += num_prompt

    def cancel(self, request_id: str, index: int | None = None) -> None:
        kept = [
            choice
            for choice in self._choices
            if choice.request.request_id != request_id or index not in (None, choice.index)
        ]
        self._totals.cancelled += len(kept) < len(self._choices)
        self._choices = kept

    def step(self) -> list[RequestOutput]:
        self._sleep_out_step()
        now_s = time.monotonic()
        running = self._choices[: self.options.max_num_requests]
        waiting = self._choices[self.options.max_num_requests :]
        outputs = [self._advance(choice, now_s) for choice in running]
        self._choices = [
            choice
            for choice, output in zip(running, outputs, strict=True)
            if output.finish_reason is None
        ] + waiting
        self._totals.steps += 1
        self._batch_rows = len(running)
        return outputs

    def take_phases(self) -> dict[str, list[Phase]]:
        return {}

    def watch_cache(self) -> None:
        return None

    def prefill_load(self) -> PrefillLoad:
        return PrefillLoad(0, self._totals.prompt_tokens)

    def stats(self) -> EngineStats:
        totals, running = self._totals, min(len(self._choices), self.options.max_num_requests)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._choices) - running,
            num_blocks=self.options.num_blocks,
            num_used_blocks=sum(self._held_blocks()),
            batch_rows=self._batch_rows,
            batch_tokens=self._batch_rows,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            generated_tokens_total=totals.generated_tokens,
            finished_total=totals.finished,
            cancelled_total=totals.cancelled,
            failed_total=totals.failed,
        )

    def _sleep_out_step(self) -> None:
        wait_s = self._last_step_s + self.options.step_ms / 1000 - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        self._last_step_s = time.monotonic()

    def _advance(self, choice: _Choice, now_s: float) -> RequestOutput:
        request = choice.request
        if request.deadline_s is not None and now_s >= request.deadline_s:
            self._totals.failed += 1
            return RequestOutput(
                request.request_id,
                choice.index,
                [],
                finish_reason=FinishReason.ERROR,
                error="The request's deadline passed before it was done.",
                error_code="deadline_exceeded",
            )
        token_id = self._token_at(choice)
        choice.num_generated += 1
        self._totals.generated_tokens += 1
        is_last = choice.num_generated >= choice.max_tokens
        self._totals.finished += is_last
        sampling = request.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            finish = FinishReason.LENGTH if is_last else None
            return RequestOutput(request.request_id, choice.index, [token_id], finish_reason=finish)
        return self._with_logprobs(choice, token_id, is_last)

    def _with_logprobs(self, choice: _Choice, token_id: int, is_last: bool) -> RequestOutput:
        sampling = choice.request.sampling
        logprobs, prompt_logprobs = None, None
        if sampling.logprobs is not None:
            logprobs = [_stand_in_logprobs(token_id, sampling.logprobs)]
        is_first = choice.num_generated == 1 and choice.index == 0
        if sampling.prompt_logprobs is not None and is_first:
            count, ids = sampling.prompt_logprobs, choice.request.prompt_token_ids
            prompt_logprobs = [None, *(_stand_in_logprobs(i, count) for i in ids[1:])]
        return RequestOutput(
            choice.request.request_id,
            choice.index,
            [token_id],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )

    def _token_at(self, choice: _Choice) -> int:
        span = self.options.vocab_size - _FIRST_TOKEN_ID
        step = choice.request.seed * 31 + choice.index * 977 + choice.num_generated * 7919
        return _FIRST_TOKEN_ID + step % span

    def _held_blocks(self) -> Iterator[int]:
        block_size = self.base_config.cache.block_size
        for choice in self._choices:
            num_tokens = len(choice.request.prompt_token_ids) + choice.num_generated
            yield -(-num_tokens // block_size)


def _stand_in_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token is always the likeliest; the `count` likeliest are it and its successors."""
    top = [(token_id + i, -0.5 - i) for i in range(count)]
    return TokenLogprobs(token_id, -0.5, 1, top)
