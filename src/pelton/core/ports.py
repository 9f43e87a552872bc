# SPDX-License-Identifier: Apache-2.0
"""Ports: what a lower layer needs of a higher one, as protocols. Only `cli` wires them."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pelton.core.kv_transfer import PullOrder, PullResult
from pelton.core.request import FinishReason
from pelton.core.step import StepPlan, StepResult

SampleT = TypeVar("SampleT", contravariant=True)


class PendingStep(Protocol):
    """A step that was launched and whose results may not be on the host yet."""

    def wait(self) -> StepResult:
        """Blocks until the results are on the host; may be called again."""
        ...


class Executor(Protocol):
    """Runs planned steps in the order they are launched."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts `plan` and returns without waiting for a device. May be called again before the
        previous step was waited for: sampled tokens never visit the host before reuse."""
        ...


class KVConnector(Protocol):
    """Brings the KV of prompts that another engine computes into this engine's blocks.

    Called between steps by the loop that owns the engine; no call waits for another process.
    """

    def pull(self, order: PullOrder) -> None:
        """Asks the request's `prefill_at` to compute the prompt. From now until its result, or
        until `drop`, the order's blocks may be written to at any `poll`."""
        ...

    def drop(self, request_id: str) -> None:
        """Ends a pull whose result was not taken: the other engine stops computing, and the blocks
        are not written to any more. Does nothing for one that is unknown."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether `poll` has results although nothing arrives: a worker does not answer."""
        ...

    def poll(self) -> list[PullResult]:
        """Copies and checks what has arrived, up to a limit that keeps it short."""
        ...


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """Tokens of one request that reached the client together."""

    time_ns: int
    """When, by `time.time_ns`: the clock that LoadGen stamps its own times with."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set once, with the last tokens. What follows it carries counts only."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV came from another request. None: not said."""


class SystemUnderTest(Protocol[SampleT]):
    """Something that generates tokens under load: an engine in a worker, a server over HTTP."""

    def generate(self, sample: SampleT, request_id: str) -> AsyncGenerator[TokenArrival, None]:
        """Yields tokens as they arrive. A request that fails raises; closing the generator
        cancels it."""
        ...

    async def close(self) -> None: ...
