# SPDX-License-Identifier: Apache-2.0
"""Where the guesses come from that a decode step verifies beside its one sure token.

A drafter only guesses. Whatever it proposes, the tokens that come out are those of decoding one by
one: the sampler draws at every drafted place as if the tokens before it were settled, and a draft
is accepted when the draw is the draft. For a guess that is one token and not a distribution this
is rejection sampling (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", 2023): a draft is accepted with its probability, and what comes instead of a rejected
one has the distribution without it. And a seed gives the same tokens with drafts as without.
"""

from collections.abc import Sequence
from typing import Protocol

from pelton.core.config import DraftMethod, SpeculativeConfig
from pelton.engine.request_state import RequestState
from pelton.engine.speculative.ngram import propose_ngram


class Drafter(Protocol):
    num_lookahead: int
    """Places after a step's tokens where drafting leaves keys and values of its own."""

    def propose(self, choice: RequestState, max_drafts: int) -> Sequence[int]:
        """At most `max_drafts` guesses for the tokens after the last of `choice.token_ids`."""
        ...


class NgramDrafter:
    """Looks the last tokens up in what the request has so far."""

    num_lookahead = 0

    def propose(self, choice: RequestState, max_drafts: int) -> Sequence[int]:
        return propose_ngram(choice.token_ids, choice.packed_ids, max_drafts)


class ExecutorDrafter:
    """The executor guessed on the device when it ran the step that made the last token."""

    def __init__(self, num_drafts: int) -> None:
        # The first guess reads the step's own places; each later one adds the token before it.
        self.num_lookahead = num_drafts - 1

    def propose(self, choice: RequestState, max_drafts: int) -> Sequence[int]:
        return choice.drafts[:max_drafts]


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """None: speculative decoding is off."""
    if config.method is DraftMethod.NGRAM:
        return NgramDrafter()
    if config.method is DraftMethod.MTP:
        return ExecutorDrafter(config.num_drafts)
    return None
