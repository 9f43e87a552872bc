# SPDX-License-Identifier: Apache-2.0
"""What the router reads and what it answers: plain data, no clock, no socket.

Blocks are counted as one KV group sees them: a worker whose model has several groups reports the
mean over them, so that one block stands for `block_size` tokens of a request everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pelton.core.block_hash import BlockHash
from pelton.core.config import Role
from pelton.core.errors import ConfigError

REPORT_DELAY_S = 0.25
"""A booking younger than this may be missing in a worker's report: on its way, or behind a step."""
_NUM_HEADER_SCORES = 8


class Policy(StrEnum):
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    """Fewest requests for the slots there are."""
    INPUT_LENGTH = "input-length"
    """Smallest sum of prompt tokens that are not prefilled yet."""
    KV_AWARE = "kv-aware"
    """Least work: prefill left after cached blocks, blocks held, blocks to transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as it last described itself: what it can hold, and the load of all frontends."""

    id: str
    """Stays the same when the worker restarts."""
    generation: int
    """Grows with every restart: what an earlier one held or owed is void."""
    role: Role = Role.MIXED
    num_slots: int
    """Requests that run at once."""
    num_blocks: int
    block_size: int
    """Tokens a block."""
    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    """Held by live requests."""
    num_pending_prefill_tokens: int = 0
    """Prompt tokens of accepted requests that no step has computed yet."""
    prefill_tokens_per_s: float = 0.0
    """Measured while there was prefill to do (`admission.RateMeter`). 0: unknown."""
    requests_per_s: float = 0.0
    """Finished while requests waited for a slot. 0: unknown."""
    max_waiting: int = 1024
    """Requests beyond its slots that it is given; more are not routed to it."""
    reported_at_s: float = 0.0
    """When the load was as said here, on the frontend's monotonic clock; the time of arrival where
    the worker's clock is another one."""
    publishes_events: bool = False
    """Says what its prefix cache holds (`events`). Otherwise the router goes by its own decisions
    of the last minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    request_id: str
    num_prompt_tokens: int
    block_hashes: Sequence[BlockHash] = ()
    """The chain over the prompt's full blocks (`core.block_hash.hash_prompt`, which puts model and
    cache salt into its root), made once by whoever tokenised. Empty: nothing may be reused."""
    knows_caches: bool = True
    """Whether routing follows what workers have cached. Otherwise they may hold any of it."""
    num_choices: int = 1
    priority: int = 0
    """Lower goes first."""
    deadline_s: float | None = None
    """Absolute, on the clock that the router reads."""
    session: str = ""
    """Requests of one session go to one worker while it can take them. Empty: no session."""
    excluded: frozenset[str] = frozenset()
    """Workers that must not get it: those that are down, silent, draining or of another role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    request_id: str
    worker_id: str
    generation: int
    policy: Policy
    compared: Sequence[str]
    """Every worker that could have taken the request. Empty where the policy does not compare."""
    costs: Sequence[float]
    """Theirs; the lowest is best."""
    cached_tokens: int | None
    """Prompt tokens that the worker is believed to have cached; None: that is not followed."""
    reason: str
    """One line: what was weighed."""
    prefill_at: str = ""
    """The worker that computes the prompt, if that is another one."""

    @property
    def scores(self) -> dict[str, float]:
        return dict(zip(self.compared, self.costs, strict=True))

    @property
    def header(self) -> str:
        """The value of `x-pelton-route`: one line, with the eight best scores."""
        line = f"worker={self.worker_id}; "
        if self.prefill_at:
            line += f"prefill={self.prefill_at}; "
        if self.cached_tokens is not None:
            line += f"cached={self.cached_tokens}; "
        line += f"reason={self.reason}"
        return f"{line}; scores={self.score_text}" if self.costs else line

    @property
    def score_text(self) -> str:
        """The eight best scores, in one line."""
        best = sorted(self.scores.items(), key=lambda item: item[1])[:_NUM_HEADER_SCORES]
        return ",".join(f"{worker_id}:{score:.4g}" for worker_id, score in best)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    policy: Policy = Policy.KV_AWARE
    temperature: float = 0.0
    """0: the least cost. Above: softmax over negative costs, scaled to their range."""
    prefill_weight: float = 4.0
    """Cost of one block's worth of tokens to prefill, in blocks held."""
    transfer_weight: float = 0.0
    """Cost of one block that a decode worker would have to pull, in blocks held."""
    num_frontends: int = 1
    """Routers that send to the same workers, each seeing its own share of the requests."""
    report_delay_s: float = REPORT_DELAY_S
    event_delay_s: float = 2.0
    """How long a decision counts as cached blocks while the events about them are on their way."""
    eventless_memory_s: float = 120.0
    """The same where a worker publishes no events."""
    session_ttl_s: float = 600.0
    max_sessions: int = 100_000
    num_explained: int = 256
    """Decisions that `Router.recent` keeps."""
    seed: int = 0

    def policy_for(self, need: Role) -> Policy:
        """Prompts that are computed apart go where the fewest wait to be, unless caches count."""
        if need is Role.PREFILL and self.policy is not Policy.KV_AWARE:
            return Policy.INPUT_LENGTH
        return self.policy

    def __post_init__(self) -> None:
        for name in ("temperature", "prefill_weight", "transfer_weight", "report_delay_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in ("num_frontends", "max_sessions", "event_delay_s", "eventless_memory_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")
