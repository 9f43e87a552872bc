# SPDX-License-Identifier: Apache-2.0
"""Decides what each step computes, and applies what it computed.

`plan` fills one token budget: a token for every running decode first, then chunks of prompts that
are partly computed, then waiting requests in strict order of (priority, arrival). When blocks run
out, the running request that is last in that order is preempted: it gives everything back and is
computed again later. `commit` takes results in the order of the plans.

With overlap a step is planned before the previous one is committed. So a choice counts tokens
planned apart from tokens computed; an end that only a token's value decides is learnt one step
late, and the row that ran meanwhile is dropped at its commit. A slot or block that was given up
may be taken again at once, because steps execute in the order of their plans; a late result
belongs to the choice that its row was planned for, never to the new owner of the slot.
"""

from bisect import insort
from collections import deque
from operator import attrgetter

from pelton.core.block_hash import make_root_hash
from pelton.core.clock import Clock
from pelton.core.config import EngineConfig, resolved
from pelton.core.env import is_debug
from pelton.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NumericalError,
)
from pelton.core.geometry import ModelGeometry
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from pelton.core.stats import EngineStats
from pelton.core.step import Admission, BlockUpdate, StepPlan, StepResult
from pelton.engine.kv.block_tables import BlockTable, BlockTables, max_tokens_in_flight
from pelton.engine.kv.prefix_index import PrefixHit
from pelton.engine.request_queue import LiveQueue
from pelton.engine.request_state import NO_SLOT, LiveRequest, RequestState, State
from pelton.engine.validation import validate_request

_key = attrgetter("key")


class _Draft:
    """A step in the making. Nothing of a choice's progress changes before the draft is final, so
    that a row can be taken out again when its choice is preempted for another."""

    __slots__ = ("admissions", "budget", "chunks", "decodes", "has_preempted", "updates")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[RequestState] = []
        self.chunks: list[tuple[RequestState, int]] = []
        self.admissions: list[Admission] = []
        self.updates: list[BlockUpdate] = []
        self.has_preempted = False


class Scheduler:
    """Plans and commits the steps of one engine. Not thread safe: one loop owns it."""

    def __init__(self, config: EngineConfig, geometry: ModelGeometry, clock: Clock) -> None:
        """`config` must be resolved."""
        self._clock = clock
        self._vocab_size = geometry.vocab_size
        self._eos_token_ids = geometry.eos_token_ids
        self._model = config.model.model
        self._max_model_len = resolved(config.model.max_model_len)
        self._max_tokens = resolved(config.scheduler.max_num_batched_tokens)
        self._shares_prefixes = config.cache.prefix_cache
        self._block_size = config.cache.block_size
        self._checks_blocks = is_debug()
        self._tables = BlockTables(
            geometry.kv_groups,
            resolved(config.cache.num_blocks),
            self._block_size,
            max_tokens_in_flight(config.scheduler),
        )
        self._free_slots = list(reversed(range(resolved(config.scheduler.max_num_requests))))
        self._num_slots = len(self._free_slots)

        self._live: dict[str, LiveRequest] = {}
        self._num_unfinished = 0
        self._num_arrived = 0
        self._waiting: LiveQueue[RequestState] = LiveQueue(
            lambda choice: choice.state is State.FINISHED
        )
        self._deadlines: LiveQueue[LiveRequest] = LiveQueue(lambda live: not live.num_unfinished)
        # Sorted by key. A choice that ended stays until the next plan tidies up.
        self._decoding: list[RequestState] = []
        self._prefilling: list[RequestState] = []
        self._is_untidy = False
        self._in_flight: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self._ended: list[RequestOutput] = []
        self._ended_ids: set[str] = set()

        self._num_steps = 0
        self._batch_rows = self._batch_tokens = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated = 0
        self._num_preemptions = self._num_finished = self._num_cancelled = self._num_failed = 0

    # Requests come and go.

    def add(self, request: GenerateRequest) -> None:
        """Takes ownership of `request`. Raises `InvalidRequestError` or `ContextLengthError`."""
        request_id = request.request_id
        if request_id in self._live or request_id in self._ended_ids:
            raise InvalidRequestError(
                f"request_id {request_id!r} belongs to a request that has not ended.",
                param="request_id",
            )
        validate_request(request, self._vocab_size, self._max_model_len)
        salt = {"model": self._model, "tenant": request.cache_salt}
        if not self._shares_prefixes:
            # The choices of a request share their prompt even so, and a resumed one its own past.
            salt["request"] = str(self._num_arrived)
        root_hash = make_root_hash(salt)
        live = LiveRequest(request)
        for index in range(request.sampling.n):
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
        self._live[request_id] = live
        self._num_unfinished += live.num_unfinished
        self._enqueue(live.choices[0])
        if request.deadline_s is not None:
            self._deadlines.push(request.deadline_s, live.choices[0].key[1], live)

    def cancel(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and ended ones are left alone. Each
        choice that had not ended gets a last output with `FinishReason.CANCELLED`."""
        live = self._live.get(request_id)
        if live is not None:
            self._end_all(live, FinishReason.CANCELLED)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step or an output waits to be taken."""
        return bool(self._live or self._in_flight or self._ended)

    def take_ended(self) -> list[RequestOutput]:
        """The last outputs of requests that ended other than by a step's result."""
        ended, self._ended = self._ended, []
        self._ended_ids.clear()
        return ended

    # Plan.

    def plan(self) -> StepPlan | None:
        """Decides the next step and reserves its slots and blocks. None: there is nothing to
        compute before a step in flight is committed, or nothing at all."""
        self._end_expired()
        self._tidy()
        draft = _Draft(self._max_tokens)
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        self._plan_admissions(draft)
        if not draft.decodes and not draft.chunks:
            assert self._in_flight or not self._live, f"stuck: {list(self._live.values())[:3]}"
            return None
        return self._launchable(draft)

    def _plan_decodes(self, draft: _Draft) -> None:
        decodes = draft.decodes
        # A preemption takes choices from the end of the list while this loop walks it.
        for choice in self._decoding:
            if len(decodes) >= draft.budget:
                break
            if choice.num_planned >= choice.next_check:
                is_last_token_planned = choice.num_planned + 1 >= choice.max_len
                if is_last_token_planned or not self._grow_decode(draft, choice):
                    continue
            decodes.append(choice)
        draft.budget -= len(decodes)

    def _grow_decode(self, draft: _Draft, choice: RequestState) -> bool:
        """Gets the block for one more token, from others if need be. False: it was preempted."""
        table = _table_of(choice)
        while not self._tables.try_grow(table, choice.num_planned + 1, choice.slot, draft.updates):
            if self._preempt_last(draft) is choice:
                return False
        self._set_next_check(choice)
        return True

    def _plan_chunks(self, draft: _Draft) -> None:
        for choice in self._prefilling:
            if not draft.budget:
                break
            wanted = min(len(choice.token_ids) - choice.num_planned, draft.budget)
            table = _table_of(choice)
            room = self._tables.growable_tokens(table) - choice.num_planned
            while not room and self._last_running() is not choice:
                self._preempt_last(draft)
                room = self._tables.growable_tokens(table) - choice.num_planned
            if room:
                self._plan_chunk(draft, choice, min(wanted, room))

    def _plan_chunk(self, draft: _Draft, choice: RequestState, num_tokens: int) -> None:
        has_grown = self._tables.try_grow(
            _table_of(choice), choice.num_planned + num_tokens, choice.slot, draft.updates
        )
        assert has_grown, f"no room for {num_tokens} tokens of {choice!r}"
        draft.chunks.append((choice, num_tokens))
        draft.budget -= num_tokens

    def _plan_admissions(self, draft: _Draft) -> None:
        # Who was just preempted is next in line or near it: admitting now would take its place.
        while draft.budget and not draft.has_preempted:
            choice = self._waiting.peek()
            if choice is None or choice.state is State.PREEMPTED:
                return
            hit = self._find_room(draft, choice)
            if hit is None:
                return
            self._waiting.pop()
            self._admit(draft, choice, hit)

    def _find_room(self, draft: _Draft, choice: RequestState) -> PrefixHit | None:
        """What `choice` finds cached, if it can be admitted; may preempt strictly lower
        priorities for it."""
        can_preempt = False
        last = self._last_running()
        if last is not None and last.priority > choice.priority:
            can_preempt = True
        if not self._free_slots and not can_preempt:
            return None
        hit = self._find_hit(choice)
        if self._free_slots and self._fits(choice, hit):
            return hit
        if not can_preempt or not self._could_fit(choice, hit):
            return None
        while last is not None and last.priority > choice.priority:
            self._preempt_last(draft)
            if self._fits(choice, hit):
                return hit
            last = self._last_running()
        return None

    def _find_hit(self, choice: RequestState) -> PrefixHit:
        if choice.prompt_logprobs is not None:
            return self._tables.no_hit()  # every prompt position must be computed
        num_blocks = (len(choice.token_ids) - 1) // self._block_size
        return self._tables.find_hit(choice.chain(num_blocks, self._block_size))

    def _fits(self, choice: RequestState, hit: PrefixHit) -> bool:
        """Whether all known tokens of `choice` fit beside what running prompts still need and a
        block for each running request, so that it is not preempted right away."""
        missing = self._tables.missing_blocks(len(choice.token_ids), hit)
        for running in self._prefilling:
            more = self._tables.missing_blocks(len(running.token_ids), _table_of(running))
            missing = [a + b for a, b in zip(missing, more, strict=True)]
        reserve = len(self._decoding) + len(self._prefilling)
        pools = self._tables.pools
        return all(n + reserve <= pool.num_free for n, pool in zip(missing, pools, strict=True))

    def _could_fit(self, choice: RequestState, hit: PrefixHit) -> bool:
        """Whether preempting every lower priority could make room: an upper bound, since a
        shared block is counted for each of its holders."""
        missing = self._tables.missing_blocks(len(choice.token_ids), hit)
        for running in (*self._decoding, *self._prefilling):
            if running.priority > choice.priority:
                held = _table_of(running).num_entries
                missing = [n - held for n in missing]
        pools = self._tables.pools
        return all(n <= pool.num_free for n, pool in zip(missing, pools, strict=True))

    def _admit(self, draft: _Draft, choice: RequestState, hit: PrefixHit) -> None:
        choice.advance(State.PREFILLING)
        choice.slot = self._free_slots.pop()
        choice.table = self._tables.open(hit, choice.slot, draft.updates)
        num_hit_tokens = hit.num_blocks * self._block_size
        choice.num_planned = choice.num_computed = num_hit_tokens
        choice.next_publish = num_hit_tokens + self._block_size
        insort(self._prefilling, choice, key=_key)
        if not choice.was_admitted:
            choice.was_admitted = True
            choice.num_cached_tokens = num_hit_tokens
            self._num_prompt_tokens += choice.num_prompt_tokens
            self._num_cached_tokens += num_hit_tokens
        draft.admissions.append(
            Admission(
                slot=choice.slot,
                token_ids=choice.token_ids.copy(),
                num_prompt_tokens=choice.num_prompt_tokens,
                sampling=choice.sampling,
                seed=choice.seed,
                eos_token_ids=choice.eos_token_ids,
            )
        )
        num_tokens = min(len(choice.token_ids) - num_hit_tokens, draft.budget)
        self._plan_chunk(draft, choice, num_tokens)

    def _launchable(self, draft: _Draft) -> StepPlan:
        """Makes the draft final: counts its tokens as planned and its rows as pending."""
        decodes, chunks = draft.decodes, draft.chunks
        rows = decodes + [choice for choice, _ in chunks]
        starts = [choice.num_planned for choice in rows]
        num_tokens = [1] * len(decodes)
        samples = [True] * len(decodes)
        prompt_logprob_rows = []
        for choice in decodes:
            choice.num_planned += 1
            choice.num_pending += 1
        for choice, count in chunks:
            if choice.prompt_logprobs and choice.num_planned + 1 < choice.num_prompt_tokens:
                prompt_logprob_rows.append(len(num_tokens))
            choice.num_planned += count
            choice.num_pending += 1
            is_last = choice.num_planned == len(choice.token_ids)
            num_tokens.append(count)
            samples.append(is_last)
            if is_last:
                choice.advance(State.DECODING)
                self._prefilling.remove(choice)
                insort(self._decoding, choice, key=_key)
                self._set_next_check(choice)
        plan = StepPlan(
            step_id=self._num_steps,
            admissions=draft.admissions,
            block_updates=draft.updates,
            slots=[choice.slot for choice in rows],
            starts=starts,
            num_tokens=num_tokens,
            samples=samples,
            num_decodes=len(decodes),
            prompt_logprob_rows=prompt_logprob_rows,
        )
        self._num_steps += 1
        self._batch_rows = len(rows)
        self._batch_tokens = self._max_tokens - draft.budget
        self._in_flight.append((plan, rows))
        return plan

    def _set_next_check(self, choice: RequestState) -> None:
        capacity = _table_of(choice).num_entries * self._block_size
        choice.next_check = min(capacity, choice.max_len - 1)

    # Preemption.

    def _last_running(self) -> RequestState | None:
        """The running choice that is last in order: the first to be preempted."""
        tails = [choices[-1] for choices in (self._decoding, self._prefilling) if choices]
        return max(tails, key=_key, default=None)

    def _preempt_last(self, draft: _Draft) -> RequestState:
        choice = self._last_running()
        assert choice is not None, "out of blocks although nothing runs"
        running = self._decoding if choice.state is State.DECODING else self._prefilling
        running.pop()
        self._drop_from_draft(draft, choice)
        draft.has_preempted = True
        self._release(choice)
        choice.advance(State.PREEMPTED if choice.num_pending else State.WAITING)
        self._enqueue(choice)
        self._num_preemptions += 1
        return choice

    def _drop_from_draft(self, draft: _Draft, choice: RequestState) -> None:
        if draft.decodes and draft.decodes[-1] is choice:
            draft.decodes.pop()
            draft.budget += 1
        for position, (planned, num_tokens) in enumerate(draft.chunks):
            if planned is choice:
                del draft.chunks[position]
                draft.budget += num_tokens
                break
        draft.updates = [update for update in draft.updates if update.slot != choice.slot]

    # Commit.

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Applies the results of the oldest step in flight. Returns what each choice gained, and
        the last outputs of those that ended otherwise since the last call."""
        oldest, rows = self._in_flight.popleft()
        assert plan is oldest, f"step {plan.step_id} committed before {oldest.step_id}"
        assert result.step_id == plan.step_id, f"{result.step_id} is not {plan.step_id}"
        outputs = self.take_ended()
        sampled, starts = result.sampled, plan.starts
        is_plain = not (result.failed_rows or result.logprobs)
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
                    self._settle_blocks(choice)
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
        if self._checks_blocks:
            self._tables.check()
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
            self._tables.unpublish(choice.block_hashes)
            error = NumericalError(result.failed_rows[row])
            outputs.append(self._end(choice, FinishReason.ERROR, error))
            return
        if choice.prompt_logprobs is not None:
            known = result.prompt_logprobs.get(row, [])
            first = plan.starts[row] + 1
            choice.prompt_logprobs[first : first + len(known)] = known
        if choice.table is not None:
            choice.num_computed = plan.starts[row] + plan.num_tokens[row]
            if choice.num_computed >= choice.next_publish:
                self._settle_blocks(choice)
            if choice.index == 0 and choice.num_computed >= choice.num_prompt_tokens:
                self._unpark(choice.live)
        if plan.samples[row]:
            outputs.append(self._append(choice, result.sampled[row], result.logprobs.get(row)))
        if choice.state is State.PREEMPTED and not choice.num_pending:
            choice.advance(State.WAITING)

    def _append(
        self, choice: RequestState, sampled: list[int], logprobs: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Accepts new tokens up to the one that ends the choice."""
        accepted: list[int] = []
        finish_reason = None
        stop_token_id = None
        for token in sampled:
            accepted.append(token)
            choice.token_ids.append(token)
            length = len(choice.token_ids)
            if token in choice.stop_token_ids and length >= choice.first_stop_len:
                finish_reason = FinishReason.STOP
                stop_token_id = token
                break
            if length >= choice.max_len:
                finish_reason = FinishReason.LENGTH
                break
        self._num_generated += len(accepted)
        output = RequestOutput(
            choice.request_id,
            choice.index,
            accepted,
            logprobs=None if logprobs is None else logprobs[: len(accepted)],
            prompt_logprobs=choice.prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=choice.num_cached_tokens,
        )
        choice.prompt_logprobs = None
        if finish_reason is not None:
            self._finish(choice, finish_reason)
        return output

    def _settle_blocks(self, choice: RequestState) -> None:
        """Publishes the blocks that became full; frees those that no window reaches any more."""
        num_full = choice.num_computed // self._block_size
        table = _table_of(choice)
        self._tables.publish(table, choice.chain(num_full, self._block_size))
        self._tables.free_passed(table, choice.num_computed)
        choice.next_publish = (num_full + 1) * self._block_size

    # Ends.

    def _end_expired(self) -> None:
        live = self._deadlines.peek()
        while live is not None and _deadline_of(live) <= self._clock.now_s():
            error = DeadlineExceededError("The request's deadline passed before it was done.")
            self._end_all(live, FinishReason.ERROR, error)
            live = self._deadlines.peek()

    def _end_all(
        self,
        live: LiveRequest,
        reason: FinishReason,
        error: DeadlineExceededError | None = None,
    ) -> None:
        # The first choice last: nobody is unparked only to end.
        for choice in reversed(live.choices):
            if choice.state is not State.FINISHED:
                self._ended.append(self._end(choice, reason, error))
        self._ended_ids.add(live.request.request_id)

    def _end(
        self,
        choice: RequestState,
        reason: FinishReason,
        error: DeadlineExceededError | NumericalError | None,
    ) -> RequestOutput:
        """Ends a choice without a token and returns its last output."""
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
        if choice.table is not None:
            self._release(choice)
            self._is_untidy = True
        choice.advance(State.FINISHED)
        live = choice.live
        live.num_unfinished -= 1
        self._num_unfinished -= 1
        if not live.num_unfinished:
            del self._live[choice.request_id]
        elif choice.index == 0:
            self._unpark(live)
        if reason is FinishReason.CANCELLED:
            self._num_cancelled += 1
        elif reason is FinishReason.ERROR:
            self._num_failed += 1
        else:
            self._num_finished += 1

    def _unpark(self, live: LiveRequest) -> None:
        """Lets the other choices follow the first, whose prompt is cached now or never will be."""
        for choice in live.choices[1:]:
            if choice.state is State.PARKED:
                choice.advance(State.WAITING)
                self._enqueue(choice)

    def _enqueue(self, choice: RequestState) -> None:
        self._waiting.push(*choice.key, choice)

    def _release(self, choice: RequestState) -> None:
        """Gives slot and blocks back; the choice's progress in them is gone."""
        self._tables.close(_table_of(choice))
        choice.table = None
        self._free_slots.append(choice.slot)
        choice.slot = NO_SLOT
        choice.num_planned = choice.num_computed = 0

    def _tidy(self) -> None:
        if self._is_untidy:
            self._decoding = [c for c in self._decoding if c.state is State.DECODING]
            self._prefilling = [c for c in self._prefilling if c.state is State.PREFILLING]
            self._is_untidy = False

    # Figures.

    def stats(self) -> EngineStats:
        pools = self._tables.pools
        num_running = self._num_slots - len(self._free_slots)
        return EngineStats(
            num_running=num_running,
            num_waiting=self._num_unfinished - num_running,
            num_blocks=sum(pool.num_usable for pool in pools),
            num_used_blocks=sum(pool.num_used for pool in pools),
            num_cached_blocks=sum(pool.num_cached for pool in pools),
            batch_rows=self._batch_rows,
            batch_tokens=self._batch_tokens,
            steps_total=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            cached_tokens_total=self._num_cached_tokens,
            generated_tokens_total=self._num_generated,
            preemptions_total=self._num_preemptions,
            finished_total=self._num_finished,
            cancelled_total=self._num_cancelled,
            failed_total=self._num_failed,
        )


def _table_of(choice: RequestState) -> BlockTable:
    assert choice.table is not None, f"{choice!r} holds no blocks"
    return choice.table


def _deadline_of(live: LiveRequest) -> float:
    deadline_s = live.request.deadline_s
    assert deadline_s is not None
    return deadline_s
