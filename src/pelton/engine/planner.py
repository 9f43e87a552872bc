# SPDX-License-Identifier: Apache-2.0
"""Decides what one step computes: who runs, how many tokens, in which blocks.

One token budget a step: a token for every running decode first, then drafts for them, then a token
for each choice whose prompt has arrived from another engine, then the prompt that is partly
computed, then waiting choices in strict order of (priority, arrival). If the first of those does
not fit, nobody is admitted. When blocks run out, the running choice that is last in that order is
preempted; a waiting choice may preempt choices of a strictly lower priority. Drafts never preempt,
and take at most half of the budget that the decodes leave.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from pelton.core.config import DraftMethod, EngineConfig, resolved
from pelton.core.kv_transfer import PullOrder
from pelton.core.ports import KVConnector
from pelton.core.step import Admission, BlockUpdate, StepPlan
from pelton.engine.kv.leases import LeaseTable
from pelton.engine.kv.prefix_index import PrefixHit
from pelton.engine.request_queue import LiveQueue
from pelton.engine.request_state import RequestState, State
from pelton.engine.running import RunningChoices
from pelton.engine.speculative.drafter import Drafter


class _Draft:
    """A step in the making. No choice's progress changes before the draft is final, so that a row
    can be taken out again when its choice is preempted for another."""

    __slots__ = ("admissions", "budget", "chunks", "decodes", "drafts", "has_preempted", "updates")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[RequestState] = []
        self.drafts: dict[RequestState, Sequence[int]] = {}
        """Of decodes that have some."""
        self.chunks: list[tuple[RequestState, int]] = []
        self.admissions: list[Admission] = []
        self.updates: list[BlockUpdate] = []
        self.has_preempted = False

    def drop(self, choice: RequestState) -> None:
        """Takes out the choice that is last in order, whatever was planned for it."""
        if self.decodes and self.decodes[-1] is choice:
            self.decodes.pop()
            self.budget += 1 + len(self.drafts.pop(choice, ()))
        for position, (planned, num_tokens) in enumerate(self.chunks):
            if planned is choice:
                del self.chunks[position]
                self.budget += num_tokens
                break
        self.admissions = [item for item in self.admissions if item.slot != choice.slot]
        self.updates = [update for update in self.updates if update.slot != choice.slot]


class Planner:
    def __init__(
        self,
        config: EngineConfig,
        running: RunningChoices,
        waiting: LiveQueue[RequestState],
        drafter: Drafter | None,
        leases: LeaseTable,
        connector: KVConnector | None = None,
    ) -> None:
        """Moves choices between `waiting` and `running`, which both stay the caller's. Without
        `connector` no choice may have a source."""
        self._leases = leases
        self._connector = connector
        self._max_tokens = resolved(config.scheduler.max_num_batched_tokens)
        self._max_drafts = config.speculative.num_drafts
        self._drafter_has_kv = config.speculative.method is DraftMethod.MTP
        self._drafter = drafter
        self._running = running
        self._waiting = waiting
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.batch_rows = 0
        self.batch_tokens = 0

    def plan(self) -> tuple[StepPlan, list[RequestState]] | None:
        """The next step and the choice of each of its rows. Reserves slots and blocks, and counts
        the step's tokens as planned. None: nothing can be computed now. With a drafter, no step
        that samples may be in flight: where a decode goes on is known after its commit."""
        self._running.tidy()
        draft = _Draft(self._max_tokens)
        self._plan_decodes(draft)
        if self._drafter is not None:
            self._plan_drafts(draft, self._drafter)
        self._plan_arrivals(draft)
        self._plan_chunks(draft)
        self._plan_admissions(draft)
        if not draft.decodes and not draft.chunks:
            return None
        return self._finalize(draft)

    def _plan_decodes(self, draft: _Draft) -> None:
        decodes = draft.decodes
        # A preemption takes choices from the end of the list while this loop walks it.
        for choice in self._running.decoding:
            if choice.num_planned >= choice.next_check:
                is_last_token_planned = choice.num_planned + 1 >= choice.max_len
                if is_last_token_planned or not self._grow_decode(draft, choice):
                    continue
            decodes.append(choice)
        # Each of them had a token of an earlier budget, and nobody joined since.
        draft.budget -= len(decodes)
        assert draft.budget >= 0, f"{len(decodes)} decodes in a budget of {self._max_tokens}"

    def _grow_decode(self, draft: _Draft, choice: RequestState) -> bool:
        """Gets the block for one more token, from others if need be. False: it was preempted."""
        while not self._running.try_grow(choice, 1, draft.updates):
            if self._preempt_last(draft) is choice:
                return False
        return True

    def _plan_drafts(self, draft: _Draft, drafter: Drafter) -> None:
        """Guesses for as many decodes as half of the budget and the free blocks allow."""
        budget = draft.budget // 2
        for choice in draft.decodes:
            # A row gives at most one token more than it has drafts, and none past the last.
            places = choice.max_len - len(choice.token_ids) - 1
            room = self._running.room_for(choice) - 1
            most = min(self._max_drafts, budget, places, room)
            guesses = drafter.propose(choice, most) if most > 0 else []
            num_tokens = 1 + len(guesses)
            if guesses:
                has_grown = self._running.try_grow(choice, num_tokens, draft.updates)
                assert has_grown, f"no room for {guesses} after {choice!r}"
                draft.drafts[choice] = guesses
                draft.budget -= len(guesses)
                budget -= len(guesses)
            self._grow_lookahead(draft, choice, num_tokens)

    def _grow_lookahead(self, draft: _Draft, choice: RequestState, num_tokens: int) -> None:
        """Gets blocks for what drafting writes after `num_tokens` more than are planned, if there
        are some: where there are none it writes to the null block, and guesses worse."""
        if self._drafter is not None and self._drafter.num_lookahead:
            num_tokens += self._drafter.num_lookahead
            num_tokens = min(num_tokens, choice.max_len - choice.num_planned)
            self._running.try_grow(choice, num_tokens, draft.updates)

    def _plan_arrivals(self, draft: _Draft) -> None:
        """Those whose prompt has arrived decode from now on: what is missing is the last token of
        the prompt, a row like any decode's."""
        for choice in self._running.arrived()[: draft.budget]:
            self._running.join(choice, draft.updates)
            draft.admissions.append(_make_admission(choice))
            insort(draft.decodes, choice, key=attrgetter("key"))
            draft.budget -= 1
            self._grow_lookahead(draft, choice, 1)

    def _plan_chunks(self, draft: _Draft) -> None:
        for choice in self._running.prefilling:
            room = self._running.room_for(choice)
            while draft.budget and not room and self._running.last() is not choice:
                self._preempt_last(draft)
                room = self._running.room_for(choice)
            num_tokens = min(len(choice.token_ids) - choice.num_planned, draft.budget, room)
            if num_tokens:
                self._plan_chunk(draft, choice, num_tokens)

    def _plan_chunk(self, draft: _Draft, choice: RequestState, num_tokens: int) -> None:
        has_grown = self._running.try_grow(choice, num_tokens, draft.updates)
        assert has_grown, f"no room for {num_tokens} tokens of {choice!r}"
        draft.chunks.append((choice, num_tokens))
        draft.budget -= num_tokens
        self._grow_lookahead(draft, choice, num_tokens)

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
            if self._is_remote(choice, hit):
                self._receive(choice, hit)
            else:
                self._admit(draft, choice, hit)

    def _find_room(self, draft: _Draft, choice: RequestState) -> PrefixHit | None:
        """What `choice` finds cached, if it can be admitted; may preempt lower priorities."""
        last = self._running.last()
        can_preempt = last is not None and last.priority > choice.priority
        if not self._running.has_free_slot and not can_preempt:
            return None
        hit = self._find_hit(choice)
        if self._running.fits(choice, hit):
            return hit
        if not self._running.could_fit(choice, hit):
            return None
        while last is not None and last.priority > choice.priority:
            self._preempt_last(draft)
            if self._running.fits(choice, hit):
                return hit
            last = self._running.last()
        return None

    def _find_hit(self, choice: RequestState) -> PrefixHit:
        tables = self._running.tables
        if choice.prompt_logprobs is not None:
            return tables.no_hit()  # every prompt position must be computed
        num_blocks = (len(choice.token_ids) - 1) // self._running.block_size
        hashes = choice.chain(num_blocks, self._running.block_size)
        hit = tables.find_hit(hashes)
        if self._drafter_has_kv and hit.num_blocks:
            # The drafter's last entry of a block depends on the token behind it, which may differ.
            hit = tables.find_hit(hashes[: hit.num_blocks - 1])
        return hit

    def _is_remote(self, choice: RequestState, hit: PrefixHit) -> bool:
        """Whether another engine is to compute what `hit` leaves of the prompt."""
        if choice.source is None:
            return False
        num_left = len(choice.token_ids) - hit.num_blocks * self._running.block_size
        if num_left <= 1 or num_left < choice.source.min_tokens:
            choice.source = None
        return choice.source is not None

    def _receive(self, choice: RequestState, hit: PrefixHit) -> None:
        assert self._connector is not None, f"{choice!r} has a source"
        request = replace(choice.request, prompt_token_ids=choice.token_ids.copy())
        self._connector.pull(PullOrder(request, self._running.receive(choice, hit)))

    def _admit(self, draft: _Draft, choice: RequestState, hit: PrefixHit) -> None:
        self._running.enter(choice, hit, draft.updates)
        if not choice.was_admitted:
            choice.was_admitted = True
            choice.num_cached_tokens = min(choice.num_planned, choice.num_prompt_tokens)
            self.num_prompt_tokens += len(choice.token_ids)
            self.num_cached_tokens += choice.num_planned
        draft.admissions.append(_make_admission(choice))
        num_tokens = min(len(choice.token_ids) - choice.num_planned, draft.budget)
        self._plan_chunk(draft, choice, num_tokens)

    def _preempt_last(self, draft: _Draft) -> RequestState:
        choice = self._running.last()
        assert choice is not None, "out of blocks although nothing runs"
        draft.has_preempted = True
        draft.drop(choice)
        if choice.state is State.RECEIVING and self._connector is not None:
            self._connector.drop(choice.request_id)
        if choice.request.is_prefill_only:
            # Its lease would keep the blocks from whoever they are taken for.
            self._leases.fail(choice.request_id, "Another request needed the blocks.")
        self._running.preempt(choice)
        self._waiting.push(*choice.key, choice)
        self.num_preemptions += 1
        return choice

    def _finalize(self, draft: _Draft) -> tuple[StepPlan, list[RequestState]]:
        decodes, chunks = draft.decodes, draft.chunks
        drafts: dict[int, Sequence[int]] = {}
        num_decodes = len(decodes) - len(draft.drafts)
        if draft.drafts:
            decodes = [choice for choice in decodes if choice not in draft.drafts]
            drafts = dict(enumerate(draft.drafts.values(), num_decodes))
            decodes += draft.drafts
        rows = decodes + [choice for choice, _ in chunks]
        starts = [choice.num_planned for choice in rows]
        num_tokens = [1] * num_decodes + [1 + len(guesses) for guesses in drafts.values()]
        samples = [True] * len(decodes)
        prompt_logprob_rows = []
        for choice, count in zip(decodes, num_tokens, strict=True):
            choice.num_planned += count
            choice.num_pending += 1
        for choice, count in chunks:
            if choice.prompt_logprobs and choice.num_planned + 1 < choice.num_prompt_tokens:
                prompt_logprob_rows.append(len(num_tokens))
            choice.num_planned += count
            choice.num_pending += 1
            is_last = choice.num_planned == len(choice.token_ids)
            num_tokens.append(count)
            samples.append(is_last and not choice.request.is_prefill_only)
            if is_last:
                self._running.start_decoding(choice)
        plan = StepPlan(
            step_id=self.num_steps,
            admissions=draft.admissions,
            block_updates=draft.updates,
            slots=[choice.slot for choice in rows],
            starts=starts,
            num_tokens=num_tokens,
            samples=samples,
            num_decodes=num_decodes,
            prompt_logprob_rows=prompt_logprob_rows,
            drafts=drafts,
        )
        self.num_steps += 1
        self.batch_rows = len(rows)
        self.batch_tokens = self._max_tokens - draft.budget
        return plan, rows


def _make_admission(choice: RequestState) -> Admission:
    token_ids = choice.token_ids
    if choice.request.is_prefill_only:
        # All of the prompt: an MTP layer reads the token after each that is computed.
        token_ids = choice.request.prompt_token_ids
    return Admission(
        slot=choice.slot,
        token_ids=token_ids.copy(),
        num_prompt_tokens=choice.num_prompt_tokens,
        sampling=choice.sampling,
        seed=choice.seed,
        eos_token_ids=choice.eos_token_ids,
        matcher=choice.matcher,
    )
