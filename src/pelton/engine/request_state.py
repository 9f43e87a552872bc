# SPDX-License-Identifier: Apache-2.0
"""The life of one choice of a request, as an explicit state machine.

    PARKED ──► WAITING ◄──► PREFILLING ──► DECODING ──► FINISHED
                ▲ ▲ ▲           │           ▲ │
                │ │ └──────► RECEIVING ─────┘ │
                │ └── PREEMPTED ◄┴────────────┘        (every state may end in FINISHED)

What a choice owns follows from its state: a slot and a block table while PREFILLING, RECEIVING or
DECODING, nothing otherwise. A row that was launched before the choice lost them may still be in
flight: `num_pending` counts those rows, and PREEMPTED is WAITING with some of them still to come.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from types import MappingProxyType

from pelton.core.block_hash import BlockHash, hash_block
from pelton.core.grammar import CompiledGrammar
from pelton.core.request import GenerateRequest, TokenLogprobs
from pelton.engine.kv.block_tables import BlockTable
from pelton.engine.phases import PhaseLog


class State(Enum):
    PARKED = "parked"
    """Waits until the first choice of the request has computed the prompt that they share."""
    WAITING = "waiting"
    PREFILLING = "prefilling"
    """Some of its known tokens are not planned yet."""
    RECEIVING = "receiving"
    """Another engine computes its prompt, or has: the blocks are here, their content on its way."""
    DECODING = "decoding"
    """All its known tokens are planned; each step plans one more, and drafts after it."""
    PREEMPTED = "preempted"
    """Lost slot and blocks; its rows in flight must come back before it may run again."""
    FINISHED = "finished"


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.PARKED: frozenset({State.WAITING, State.FINISHED}),
        State.WAITING: frozenset({State.PREFILLING, State.RECEIVING, State.FINISHED}),
        State.PREFILLING: frozenset(
            {State.DECODING, State.WAITING, State.PREEMPTED, State.FINISHED}
        ),
        State.RECEIVING: frozenset({State.DECODING, State.WAITING, State.FINISHED}),
        State.DECODING: frozenset({State.WAITING, State.PREEMPTED, State.FINISHED}),
        State.PREEMPTED: frozenset({State.WAITING, State.FINISHED}),
        State.FINISHED: frozenset(),
    }
)

_PHASES = {
    State.PARKED: "queue",
    State.WAITING: "queue",
    State.PREEMPTED: "queue",
    State.PREFILLING: "prefill",
    State.RECEIVING: "kv_pull",
}
NO_SLOT = -1


class RequestState:
    """One choice: its tokens, its progress, and what it owns. The scheduler alone changes it."""

    __slots__ = (
        "block_hashes",
        "drafts",
        "eos_token_ids",
        "first_stop_len",
        "index",
        "key",
        "live",
        "matcher",
        "max_len",
        "next_check",
        "next_publish",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_planned",
        "num_prompt_tokens",
        "packed_ids",
        "phases",
        "priority",
        "prompt_logprobs",
        "request",
        "request_id",
        "root_hash",
        "sampling",
        "seed",
        "slot",
        "source",
        "state",
        "stop_token_ids",
        "table",
        "token_ids",
        "was_admitted",
    )

    def __init__(
        self,
        live: "LiveRequest",
        index: int,
        arrival: int,
        *,
        root_hash: BlockHash,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        """`arrival` orders choices of one priority; it is unique in the engine."""
        request = live.request
        sampling = request.sampling
        self.live = live
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.priority = request.priority
        self.key = (request.priority, arrival)
        self.sampling = sampling
        self.seed = choice_seed(request.seed, index)
        self.matcher = None if live.grammar is None else live.grammar.make_matcher()
        """Its place in the grammar; the executor's to move while the choice has a slot."""
        self.root_hash = root_hash
        self.state = State.PARKED if live.choices else State.WAITING
        self.phases: PhaseLog | None = None
        """Where its phases are noted, if they are."""

        self.source = request.prefill_at
        """Who computes the prompt, while it is not here; None: this engine."""
        if index or request.resumed or sampling.prompt_logprobs is not None:
            self.source = None  # it has the first choice's prompt, or needs every position's logits
        self.token_ids = request.prompt_token_ids + request.resumed.get(index, [])
        """The prompt and all accepted output tokens. Of a prompt that is computed for another
        engine, all but the last, which is that engine's to compute."""
        if request.is_prefill_only:
            self.token_ids.pop()
        self.num_prompt_tokens = len(request.prompt_token_ids) - request.is_prefill_only
        self.max_len = max_model_len
        """The choice ends when it has this many tokens."""
        max_tokens = 1 if request.is_prefill_only else sampling.max_tokens
        if max_tokens is not None:
            self.max_len = min(max_model_len, self.num_prompt_tokens + max_tokens)
        banned = sampling.stop_token_ids
        if not sampling.ignore_eos:
            banned = eos_token_ids + banned
        self.eos_token_ids = tuple(dict.fromkeys(banned))
        self.stop_token_ids = frozenset(banned)
        self.first_stop_len = self.num_prompt_tokens + sampling.min_tokens + 1
        """A stop token ends the choice only when it has at least this many tokens."""

        self.slot = NO_SLOT
        self.table: BlockTable | None = None
        self.num_planned = 0
        """Tokens whose KV is computed or planned. Drafts in flight count; a commit takes the
        rejected ones off again."""
        self.num_computed = 0
        """Tokens whose KV is computed, as far as committed steps say. Never a rejected draft."""
        self.num_pending = 0
        """Rows planned and not committed."""
        self.next_check = 0
        """`num_planned` at which a decode needs more than a row: a block, or nothing any more."""
        self.next_publish = 0
        """`num_computed` at which the next block is full."""
        self.drafts: Sequence[int] = []
        """Guesses for the tokens that follow, where the executor makes them."""
        self.packed_ids = bytearray()
        """`token_ids` as far as an n-gram drafter has packed them."""
        self.block_hashes: list[BlockHash] = []
        self.num_cached_tokens = 0
        self.was_admitted = False
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """By position, while they are wanted and not delivered."""
        if sampling.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs = [None] * self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"<{self.request_id}[{self.index}] {self.state.value} slot={self.slot}"
            f" tokens={len(self.token_ids)}/{self.max_len} planned={self.num_planned}"
            f" computed={self.num_computed} pending={self.num_pending}>"
        )

    def advance(self, state: State) -> None:
        """Goes to `state`; a move that the table does not have is a bug in the scheduler."""
        assert state in TRANSITIONS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state
        if self.phases is not None:
            self._note_phase(self.phases)

    def follow_by(self, phases: PhaseLog) -> None:
        """Notes there what the choice goes through from now on."""
        self.phases = phases
        self._note_phase(phases)

    def _note_phase(self, phases: PhaseLog) -> None:
        if self.state is State.FINISHED:
            phases.end(self.request_id, self.index)
        elif self.state is not State.DECODING:  # planned, not computed: the scheduler says when
            phases.begin(self.request_id, self.index, _PHASES[self.state])

    def chain(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks, which must be full of accepted tokens. Not
        to be changed; valid until the next call."""
        hashes = self.block_hashes
        assert num_blocks * block_size <= len(self.token_ids), f"block {num_blocks} of {self!r}"
        for first in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            parent = hashes[-1] if hashes else self.root_hash
            hashes.append(hash_block(parent, self.token_ids[first : first + block_size]))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]


class LiveRequest:
    """A request of which at least one choice has not ended."""

    __slots__ = ("choices", "grammar", "num_unfinished", "request")

    def __init__(self, request: GenerateRequest, grammar: CompiledGrammar | None = None) -> None:
        self.request = request
        self.grammar = grammar
        self.choices: list[RequestState] = []
        self.num_unfinished = len(request.choices)


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of n choices: the first keeps the request's, the others get a hash."""
    if index == 0:
        return seed
    message = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    digest = blake2b(message, digest_size=8, person=b"pelton-choice").digest()
    return int.from_bytes(digest, "little", signed=True)
