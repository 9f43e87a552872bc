# SPDX-License-Identifier: Apache-2.0
"""An executor without a model: a fixed rate, and tokens that follow from the history alone.

For tests of whatever stands around an engine, and for measuring it: with steps of known length,
TTFT and TPOT are known. The token at a position is a pure function of the tokens before it (and
of the seed, unless the request is greedy), so the same request gets the same tokens whatever
happens around it. Imports no torch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pelton.core.clock import Clock, ManualClock, MonotonicClock
from pelton.core.ports import PendingStep
from pelton.core.request import TokenLogprobs
from pelton.core.step import Admission, StepPlan, StepResult

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(slots=True)
class _Slot:
    admission: Admission
    tokens: list[int]
    history_hash: int

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.history_hash = _mix(self.history_hash, token)


def _mix(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * _MULTIPLIER) & _MASK
    return state ^ (state >> 29)


class _Step:
    def __init__(self, executor: "StandInExecutor", done_s: float, result: StepResult) -> None:
        self._executor = executor
        self._done_s = done_s
        self._result = result

    def wait(self) -> StepResult:
        self._executor.wait_until(self._done_s)
        return self._result


class StandInExecutor:
    def __init__(
        self,
        vocab_size: int,
        step_time_s: float = 0.0,
        clock: Clock | None = None,
        eos_after: int | None = None,
    ) -> None:
        """Each step takes `step_time_s`, one after the other: slept through on a real clock, and
        a `ManualClock` is moved on. Output number `eos_after` of a request is its first
        end-of-sequence or stop token, if it has one; otherwise no such token is ever made."""
        self._vocab_size = vocab_size
        self._step_time_s = step_time_s
        self._clock = MonotonicClock() if clock is None else clock
        self._eos_after = eos_after
        self._slots: dict[int, _Slot] = {}
        self._busy_until_s = 0.0

    def launch(self, plan: StepPlan) -> PendingStep:
        start_s = max(self._clock.now_s(), self._busy_until_s)
        self._busy_until_s = start_s + self._step_time_s
        for admission in plan.admissions:
            self._admit(admission)
        sampled: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row, slot_id in enumerate(plan.slots):
            if not plan.samples[row]:
                sampled.append([])
                continue
            slot = self._slots[slot_id]
            guesses = plan.drafts.get(row, [])
            end = plan.starts[row] + plan.num_tokens[row] - len(guesses)
            assert end == len(slot.tokens), f"slot {slot_id}: row ends at {end} of {slot.tokens}"
            new = self._sample(slot, guesses)
            sampled.append(new)
            if slot.admission.sampling.logprobs is not None:
                num_top = slot.admission.sampling.logprobs
                logprobs[row] = [_logprobs(token, num_top) for token in new]
        prompt_logprobs = {
            row: self._prompt_logprobs(plan, row) for row in plan.prompt_logprob_rows
        }
        result = StepResult(plan.step_id, sampled, logprobs, prompt_logprobs)
        return _Step(self, self._busy_until_s, result)

    def wait_until(self, time_s: float) -> None:
        remaining_s = time_s - self._clock.now_s()
        if remaining_s <= 0:
            return
        if isinstance(self._clock, ManualClock):
            self._clock.advance(remaining_s)
        else:
            time.sleep(remaining_s)

    def _admit(self, admission: Admission) -> None:
        sampling = admission.sampling
        state = 0 if sampling.is_greedy else admission.seed & _MASK
        for token in admission.token_ids:
            state = _mix(state, token)
        self._slots[admission.slot] = _Slot(admission, admission.token_ids.copy(), state)

    def _sample(self, slot: _Slot, guesses: Sequence[int]) -> list[int]:
        """The tokens after the history, while the guesses for them are right, and one more."""
        new = []
        for guess in (*guesses, None):
            token = self._next(slot.admission, len(slot.tokens), slot.history_hash)
            slot.push(token)
            new.append(token)
            if token != guess:
                break
        return new

    def _next(self, admission: Admission, num_tokens: int, history_hash: int) -> int:
        banned = admission.eos_token_ids
        num_outputs = num_tokens - admission.num_prompt_tokens
        if self._eos_after is not None and banned and num_outputs + 1 >= self._eos_after:
            return banned[0]
        token = (history_hash >> 20) % self._vocab_size
        while token in banned:
            token = (token + 1) % self._vocab_size
        return token

    def _prompt_logprobs(self, plan: StepPlan, row: int) -> list[TokenLogprobs]:
        slot = self._slots[plan.slots[row]]
        first = plan.starts[row] + 1
        last = min(first + plan.num_tokens[row], slot.admission.num_prompt_tokens)
        num_top = slot.admission.sampling.prompt_logprobs or 0
        return [_logprobs(token, num_top) for token in slot.tokens[first:last]]


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Made up, but a pure function of the token; the token is always the likeliest."""
    likeliest = -0.25 - (token % 7) / 16
    top = [(token, likeliest), *((other, -3.0 - other) for other in range(20) if other != token)]
    return TokenLogprobs(token, likeliest, 1, top[:num_top])
