# SPDX-License-Identifier: Apache-2.0
"""The life of requests from `add` to their last output, step by step.

`plan` decides the next step (`engine.planner`), `commit` applies its results, in the order of the
plans. With overlap a step is planned before the previous one is committed. So a choice counts
tokens planned apart from tokens computed; an end that only a token's value decides is learnt one
step late, and the row that ran meanwhile is dropped at its commit. A slot or block that was given
up may be taken again at once, because steps execute in the order of their plans; a late result
belongs to the choice that its row was planned for, never to the new owner of the slot.

With speculative decoding a step's results say where its rows go on, so none is planned while one
that samples is in flight; only chunks of prompts still overlap.
"""

from collections import deque

from pelton.core.block_hash import make_request_salt, make_root_hash
from pelton.core.clock import Clock
from pelton.core.config import EngineConfig, resolved
from pelton.core.env import is_debug
from pelton.core.errors import (
    DeadlineExceededError,
    GrammarError,
    InvalidRequestError,
    NumericalError,
    PeltonError,
)
from pelton.core.geometry import ModelGeometry
from pelton.core.grammar import CompiledGrammar
from pelton.core.kv_transfer import PullResult
from pelton.core.ports import KVConnector
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from pelton.core.stats import EngineStats, PrefillLoad
from pelton.core.step import StepPlan, StepResult
from pelton.engine.kv.blocks import CacheChange
from pelton.engine.kv.leases import LeaseTable
from pelton.engine.phases import PhaseLog
from pelton.engine.planner import Planner
from pelton.engine.request_queue import LiveQueue
from pelton.engine.request_state import LiveRequest, RequestState, State
from pelton.engine.running import RunningChoices, table_of
from pelton.engine.speculative.drafter import make_drafter
from pelton.engine.validation import validate_request


class Scheduler:
    """Plans and commits the steps of one engine. Not thread safe: one loop owns it."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: ModelGeometry,
        clock: Clock,
        connector: KVConnector | None = None,
    ) -> None:
        """`config` must be resolved. Without `connector` no request's prompt may be computed
        elsewhere."""
        self._connector = connector
        self._clock = clock
        self._vocab_size = geometry.vocab_size
        self._eos_token_ids = geometry.eos_token_ids
        self._model = config.model.model
        self._max_model_len = resolved(config.model.max_model_len)
        self._shares_prefixes = config.cache.prefix_cache
        self._checks_blocks = is_debug()
        self._live: dict[str, LiveRequest] = {}
        self._num_unfinished = 0
        self._num_arrived = 0
        self._waiting: LiveQueue[RequestState] = LiveQueue(
            lambda choice: choice.state is State.FINISHED
        )
        self._deadlines: LiveQueue[LiveRequest] = LiveQueue(lambda live: not live.num_unfinished)
        self._running = RunningChoices(config, geometry)
        self._drafter = make_drafter(config.speculative)
        self.leases = LeaseTable(self._running.tables.pools, self._running.block_size, clock)
        """Of the requests that are prefill only."""
        self.phases = PhaseLog()
        """Of the requests that are traced."""
        self._planner = Planner(
            config, self._running, self._waiting, self._drafter, self.leases, connector
        )
        self._in_flight: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self._ended: list[RequestOutput] = []
        self._ended_ids: set[str] = set()

        self._num_generated = self._num_finished = self._num_cancelled = self._num_failed = 0
        self._num_decode_rows = self._num_decode_tokens = 0
        self._num_prefills = self._num_pulls = self._num_fallbacks = self._num_pulled_bytes = 0
        self._pull_copy_s = 0.0
        self._num_drafted = [0] * config.speculative.num_drafts
        self._num_accepted = [0] * config.speculative.num_drafts

    def check(self, request: GenerateRequest) -> None:
        """Raises `InvalidRequestError` or `ContextLengthError` if `request` cannot be added."""
        request_id = request.request_id
        if request_id in self._live or request_id in self._ended_ids:
            raise InvalidRequestError(
                f"request_id {request_id!r} belongs to a request that has not ended.",
                param="request_id",
            )
        validate_request(request, self._vocab_size, self._max_model_len)
        if request.prefill_at is not None and self._connector is None:
            raise InvalidRequestError("This worker takes no KV from others: start it to decode.")
        if request.is_prefill_only and len(request.prompt_token_ids) < 2:
            raise InvalidRequestError("A prompt of one token is computed where it is decoded.")

    def add(self, request: GenerateRequest, grammar: CompiledGrammar | None = None) -> None:
        """Takes ownership of `request`, whose grammar is `grammar`. Raises `InvalidRequestError`
        or `ContextLengthError`."""
        self.check(request)
        request_id = request.request_id
        salt = make_request_salt(self._model, request.cache_salt)
        if not self._shares_prefixes:
            # The choices of a request share their prompt even so, and a resumed one its own past.
            salt["request"] = str(self._num_arrived)
        root_hash = make_root_hash(salt)
        live = LiveRequest(request, grammar)
        for index in request.choices:
            choice = RequestState(
                live,
                index,
                self._num_arrived,
                root_hash=root_hash,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._max_model_len,
            )
            live.choices.append(choice)
            self._num_arrived += 1
            if request.traceparent:
                choice.follow_by(self.phases)
        self._live[request_id] = live
        self._num_unfinished += live.num_unfinished
        self._enqueue(live.choices[0])
        if request.deadline_s is not None:
            self._deadlines.push(request.deadline_s, live.choices[0].key[1], live)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or only its choice `index`, in whatever state it is; unknown and ended
        ones are left alone. Each choice that had not ended gets a last output with
        `FinishReason.CANCELLED`."""
        live = self._live.get(request_id)
        if live is not None:
            choices = live.choices
            if index is not None:
                choices = [choice for choice in choices if choice.index == index]
            self._end_choices(live, choices, FinishReason.CANCELLED)

    def watch_cache(self) -> list[CacheChange] | None:
        """`BlockTables.watch`; None where requests share no prefixes."""
        return self._running.tables.watch() if self._shares_prefixes else None

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step or an output waits to be taken."""
        return bool(self._live or self._in_flight or self._ended)

    def take_ended(self) -> list[RequestOutput]:
        """The last outputs of requests that ended other than by a step's result."""
        ended, self._ended = self._ended, []
        self._ended_ids.clear()
        return ended

    def plan(self) -> StepPlan | None:
        """Decides the next step and reserves its slots and blocks. None: there is nothing to
        compute before a step in flight is committed, or nothing at all."""
        self._end_expired()
        if self._drafter is not None and any(any(plan.samples) for plan, _ in self._in_flight):
            return None
        planned = self._planner.plan()
        if planned is None:
            waits = self._in_flight or self._running.receiving or len(self.leases)
            assert waits or not self._live, f"stuck: {list(self._live)[:3]}"
            return None
        self._in_flight.append(planned)
        return planned[0]

    def finish_pull(self, result: PullResult) -> None:
        """The KV of a prompt has come, or will not: then the prompt is computed here."""
        live = self._live.get(result.request_id)
        choice = None if live is None else live.choices[0]
        if live is None or choice is None or choice.state is not State.RECEIVING:
            return
        if choice.phases is not None:
            choice.phases.end_pull(result)
        if result.error is not None:
            self._num_fallbacks += 1
            self._running.give_up(choice)
            self._enqueue(choice)
            return
        self._num_pulls += 1
        self._num_pulled_bytes += result.num_bytes
        self._pull_copy_s += result.copy_s
        choice.num_cached_tokens = max(choice.num_cached_tokens, result.num_cached_tokens)
        self._running.take_in(choice)
        self._unpark(live)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Applies the results of the oldest step in flight. Returns what each choice gained, and
        the last outputs of those that ended otherwise since the last call."""
        oldest, rows = self._in_flight.popleft()
        assert plan is oldest, f"step {plan.step_id} committed before {oldest.step_id}"
        assert result.step_id == plan.step_id, f"{result.step_id} is not {plan.step_id}"
        outputs = self.take_ended()
        sampled, starts = result.sampled, plan.starts
        is_plain = not (result.failed_rows or result.grammar_failures or result.logprobs)
        decoding = State.DECODING
        for row in range(plan.num_decodes if is_plain else 0):
            choice = rows[row]
            start = starts[row]
            new = sampled[row]
            # The common case, in line: one more token, and the choice goes on.
            if (
                choice.state is decoding
                and start + 2 < choice.max_len
                and new[0] not in choice.stop_token_ids
            ):
                choice.num_pending -= 1
                choice.num_computed = start + 1
                if start + 1 >= choice.next_publish:
                    self._running.settle_blocks(choice)
                choice.token_ids.append(new[0])
                self._num_generated += 1
                outputs.append(
                    RequestOutput(
                        choice.request_id,
                        choice.index,
                        new,
                        None,
                        None,
                        None,
                        None,
                        choice.num_cached_tokens,
                    )
                )
            else:
                self._commit_row(choice, row, plan, result, outputs)
        for row in range(plan.num_decodes if is_plain else 0, len(rows)):
            self._commit_row(rows[row], row, plan, result, outputs)
        self._num_decode_rows += plan.num_decodes + len(plan.drafts)
        self._num_decode_tokens += plan.num_decodes + len(plan.drafts)
        for row, drafts in result.drafts.items():
            rows[row].drafts = drafts
        if self._checks_blocks:
            self._running.tables.check()
        return outputs

    def _commit_row(
        self,
        choice: RequestState,
        row: int,
        plan: StepPlan,
        result: StepResult,
        outputs: list[RequestOutput],
    ) -> None:
        choice.num_pending -= 1
        if choice.state is State.FINISHED:
            return
        if row in result.failed_rows:
            self._running.tables.unpublish(choice.block_hashes)
            broken = NumericalError(result.failed_rows[row])
            outputs.append(self._end(choice, FinishReason.ERROR, broken))
            return
        if row in result.grammar_failures:
            error = GrammarError(result.grammar_failures[row])
            outputs.append(self._end(choice, FinishReason.ERROR, error))
            return
        if choice.prompt_logprobs is not None:
            known = result.prompt_logprobs.get(row, [])
            first = plan.starts[row] + 1
            choice.prompt_logprobs[first : first + len(known)] = known
        accepted, finish_reason = _accept(choice, result.sampled[row])
        num_drafts = len(plan.drafts.get(row, ()))
        if choice.table is not None:
            num_new = plan.num_tokens[row]
            if num_drafts:
                # The rejected drafts' places are computed again; no in-flight row knows of them.
                num_new = len(accepted)
                choice.num_planned = plan.starts[row] + num_new
            choice.num_computed = plan.starts[row] + num_new
            if choice.num_computed >= choice.next_publish:
                self._running.settle_blocks(choice)
            if choice is choice.live.choices[0] and choice.num_computed >= choice.num_prompt_tokens:
                self._unpark(choice.live)
            if choice.request.is_prefill_only:
                outputs += self._offer(choice)
        if plan.samples[row]:
            if choice.phases is not None and choice.state is State.DECODING:
                # Not of a row that was in flight when the choice was preempted: it waits again.
                choice.phases.begin(choice.request_id, choice.index, "decode")
            output = RequestOutput(
                choice.request_id,
                choice.index,
                accepted,
                logprobs=_first(result.logprobs.get(row), len(accepted)),
                prompt_logprobs=choice.prompt_logprobs,
                finish_reason=finish_reason,
                stop_token_id=accepted[-1] if finish_reason is FinishReason.STOP else None,
                num_cached_tokens=choice.num_cached_tokens,
            )
            if num_drafts:
                self._count_drafts(output, num_drafts, len(result.sampled[row]) - 1)
            outputs.append(output)
            self._num_generated += len(accepted)
            choice.prompt_logprobs = None
            if finish_reason is not None:
                self._finish(choice, finish_reason)
        if choice.state is State.PREEMPTED and not choice.num_pending:
            choice.advance(State.WAITING)

    def _offer(self, choice: RequestState) -> list[RequestOutput]:
        """Lets the lease's owner read what is computed; ends the choice when that is all."""
        is_last = choice.num_computed == len(choice.token_ids)
        self.leases.offer(
            choice.request_id,
            table_of(choice),
            choice.num_computed,
            choice.num_cached_tokens,
            is_last=is_last,
        )
        if not is_last:
            return []
        self._num_prefills += 1
        return [self._end(choice, FinishReason.LENGTH, None)]

    def _count_drafts(self, output: RequestOutput, num_drafts: int, num_right: int) -> None:
        """Counts a row's drafts. One that was right but came after the end is not an accepted
        one: the client does not get it."""
        output.num_drafts = num_drafts
        self._num_decode_tokens += len(output.token_ids) - 1
        output.num_accepted_drafts = min(num_right, len(output.token_ids))
        for place in range(num_drafts):
            self._num_drafted[place] += 1
            self._num_accepted[place] += place < output.num_accepted_drafts

    def _end_expired(self) -> None:
        live = self._deadlines.peek()
        while live is not None and _deadline_of(live) <= self._clock.now_s():
            error = DeadlineExceededError("The request's deadline passed before it was done.")
            self._end_choices(live, live.choices, FinishReason.ERROR, error)
            live = self._deadlines.peek()

    def _end_choices(
        self,
        live: LiveRequest,
        choices: list[RequestState],
        reason: FinishReason,
        error: PeltonError | None = None,
    ) -> None:
        # The first choice last: nobody is unparked only to end.
        for choice in reversed(choices):
            if choice.state is not State.FINISHED:
                self._ended.append(self._end(choice, reason, error))
        if not live.num_unfinished:
            self._ended_ids.add(live.request.request_id)

    def _end(
        self,
        choice: RequestState,
        reason: FinishReason,
        error: PeltonError | None,
    ) -> RequestOutput:
        """Ends a choice without a token and returns its last output."""
        if choice.request.is_prefill_only and reason is not FinishReason.LENGTH:
            self.leases.fail(choice.request_id, reason if error is None else error.message)
        self._finish(choice, reason)
        return RequestOutput(
            choice.request_id,
            choice.index,
            [],
            finish_reason=reason,
            num_cached_tokens=choice.num_cached_tokens,
            error=None if error is None else error.message,
            error_code=None if error is None else error.code,
        )

    def _finish(self, choice: RequestState, reason: FinishReason) -> None:
        if choice.state is State.RECEIVING and self._connector is not None:
            self._connector.drop(choice.request_id)
        self._running.end(choice)
        live = choice.live
        live.num_unfinished -= 1
        self._num_unfinished -= 1
        if not live.num_unfinished:
            del self._live[choice.request_id]
            # Each choice names its request: while a worker is busy, nobody collects a cycle that
            # has lived for long.
            live.choices = []
        elif choice is live.choices[0]:
            self._unpark(live)
        if reason is FinishReason.CANCELLED:
            self._num_cancelled += 1
        elif reason is FinishReason.ERROR:
            self._num_failed += 1
        elif not choice.request.is_prefill_only:
            self._num_finished += 1

    def _unpark(self, live: LiveRequest) -> None:
        """Lets the other choices follow the first, whose prompt is cached now or never will be."""
        for choice in live.choices[1:]:
            if choice.state is State.PARKED:
                choice.advance(State.WAITING)
                self._enqueue(choice)

    def _enqueue(self, choice: RequestState) -> None:
        self._waiting.push(*choice.key, choice)

    def prefill_load(self) -> PrefillLoad:
        """O(live choices)."""
        num_waiting = num_partial = 0
        for live in self._live.values():
            for choice in live.choices:
                if choice.source is not None:
                    continue  # another engine's work
                if choice.state in (State.WAITING, State.PREEMPTED):
                    num_waiting += len(choice.token_ids)
                elif choice.state is State.PREFILLING:
                    num_partial += len(choice.token_ids) - choice.num_planned
        admitted = self._planner.num_prompt_tokens - self._planner.num_cached_tokens
        return PrefillLoad(num_waiting + num_partial, admitted - num_partial)

    def stats(self) -> EngineStats:
        pools = self._running.tables.pools
        planner, num_running = self._planner, self._running.count
        return EngineStats(
            num_running=num_running,
            num_waiting=self._num_unfinished - num_running,
            num_blocks=sum(pool.num_usable for pool in pools),
            num_used_blocks=sum(pool.num_used for pool in pools),
            num_cached_blocks=sum(pool.num_cached for pool in pools),
            batch_rows=planner.batch_rows,
            batch_tokens=planner.batch_tokens,
            steps_total=planner.num_steps,
            prompt_tokens_total=planner.num_prompt_tokens,
            cached_tokens_total=planner.num_cached_tokens,
            generated_tokens_total=self._num_generated,
            preemptions_total=planner.num_preemptions,
            finished_total=self._num_finished,
            cancelled_total=self._num_cancelled,
            failed_total=self._num_failed,
            decode_rows_total=self._num_decode_rows,
            decode_tokens_total=self._num_decode_tokens,
            drafted_total=tuple(self._num_drafted),
            accepted_total=tuple(self._num_accepted),
            num_receiving=len(self._running.receiving),
            num_leased_blocks=self.leases.num_blocks,
            prefills_total=self._num_prefills,
            pulls_total=self._num_pulls,
            pull_fallbacks_total=self._num_fallbacks,
            pulled_bytes_total=self._num_pulled_bytes,
            pull_copy_s_total=self._pull_copy_s,
        )


def _accept(choice: RequestState, sampled: list[int]) -> tuple[list[int], FinishReason | None]:
    """Takes new tokens up to the one that ends the choice, and says why that one does."""
    accepted: list[int] = []
    for token in sampled:
        accepted.append(token)
        choice.token_ids.append(token)
        length = len(choice.token_ids)
        if token in choice.stop_token_ids and length >= choice.first_stop_len:
            return accepted, FinishReason.STOP
        if length >= choice.max_len:
            return accepted, FinishReason.LENGTH
    return accepted, None


def _first(entries: list[TokenLogprobs] | None, count: int) -> list[TokenLogprobs] | None:
    return None if entries is None else entries[:count]


def _deadline_of(live: LiveRequest) -> float:
    deadline_s = live.request.deadline_s
    assert deadline_s is not None
    return deadline_s
