# SPDX-License-Identifier: Apache-2.0
"""The policies: a number for each worker that could take the request, and the choice among them.

The cost of `kv-aware` counts in blocks held, with p, t the weights of the configuration:

    cost = p (tokens to prefill on the worker, this prompt's uncached ones included) / block size
         + blocks held by live requests, this one's included
         + t (blocks of the prompt that a decode worker must pull)

A block to prefill is work that ends; a block held is a step's share of attention for as long as
its request lives. Without anything cached both terms balance load, so a prompt that has nothing
in common with others goes where there is least to do.
"""

import math
from collections.abc import Sequence
from random import Random

from pelton.serving.router.booking import WorkerBooks
from pelton.serving.router.types import Policy, Role, RouterConfig, RouteRequest


class Candidate:
    """A worker that could take the request, and what the request would cost there."""

    __slots__ = (
        "_block_size",
        "_need",
        "_num_prompt_tokens",
        "_soon_blocks",
        "books",
        "cached_blocks",
        "indexed_blocks",
        "num_new_blocks",
        "num_new_tokens",
    )

    def __init__(
        self,
        books: WorkerBooks,
        request: RouteRequest,
        need: Role,
        indexed_blocks: int,
        soon_blocks: int,
    ) -> None:
        """Leading blocks of the prompt that events tell of, and that the router's own recent
        decisions make likely."""
        self.books = books
        self._need = need
        self._block_size = books.view.block_size
        self._num_prompt_tokens = request.num_prompt_tokens
        self._soon_blocks = soon_blocks
        self.set_indexed_blocks(indexed_blocks)

    def set_indexed_blocks(self, num_blocks: int) -> None:
        block_size, soon_blocks = self._block_size, self._soon_blocks
        self.indexed_blocks = num_blocks
        self.cached_blocks = cached = num_blocks if num_blocks > soon_blocks else soon_blocks
        # At least one token of a prompt is always computed.
        self.num_new_tokens = new_tokens = self._num_prompt_tokens - cached * block_size or 1
        self.num_new_blocks = -(-new_tokens // block_size)

    def cost(self, config: RouterConfig) -> float:
        load = self.books.load
        cost = float(load.blocks + self.num_new_blocks)
        if self._need is not Role.DECODE:
            num_tokens = load.prefill_tokens + self.num_new_tokens
            return cost + config.prefill_weight * num_tokens / self._block_size
        return cost + config.transfer_weight * self.num_new_blocks

    def __str__(self) -> str:
        load = self.books.load
        return (
            f"{self.num_new_tokens} of {self._num_prompt_tokens} tokens to prefill behind"
            f" {load.prefill_tokens}, {load.blocks} blocks held, {load.requests} requests"
        )


def choose(
    config: RouterConfig, candidates: Sequence[Candidate], random: Random, last_id: str
) -> tuple[Candidate, dict[str, float]]:
    """The worker, and the score of each (none where the policy does not compare). `last_id` is
    the worker chosen last. There is at least one candidate."""
    if config.policy is Policy.ROUND_ROBIN:
        after = [c for c in candidates if c.books.view.id > last_id]
        return min(after or candidates, key=lambda c: c.books.view.id), {}
    if config.policy is Policy.RANDOM:
        return random.choice(candidates), {}
    scores = _score(config, candidates)
    if config.temperature > 0:
        weights = _softmax(scores, config.temperature)
        chosen = random.choices(candidates, weights)[0]
    else:
        chosen = _least(candidates, scores, random)
    named = {c.books.view.id: score for c, score in zip(candidates, scores, strict=True)}
    return chosen, named


def _score(config: RouterConfig, candidates: Sequence[Candidate]) -> list[float]:
    if config.policy is Policy.LEAST_LOADED:
        return [(c.books.load.requests + 1) / c.books.view.num_slots for c in candidates]
    if config.policy is Policy.INPUT_LENGTH:
        return [float(c.books.load.prefill_tokens + c.num_new_tokens) for c in candidates]
    return [c.cost(config) for c in candidates]


def _least(candidates: Sequence[Candidate], scores: Sequence[float], random: Random) -> Candidate:
    """The lowest score; among equals the fewest requests; among equals again, any."""
    lowest = min(scores)
    best = [c for c, score in zip(candidates, scores, strict=True) if score == lowest]
    fewest = min(c.books.load.requests for c in best)
    return random.choice([c for c in best if c.books.load.requests == fewest])


def _softmax(scores: Sequence[float], temperature: float) -> list[float]:
    """Weights that fall with the score; the range of scores is 1 before the temperature."""
    lowest = min(scores)
    scale = temperature * (max(scores) - lowest)
    return [math.exp((lowest - score) / scale) if scale else 1.0 for score in scores]
