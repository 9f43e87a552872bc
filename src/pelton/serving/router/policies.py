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
from collections.abc import Mapping, Sequence
from random import Random

from pelton.core.config import Role
from pelton.serving.router.booking import WorkerBooks
from pelton.serving.router.types import Policy, RouterConfig, RouteRequest


class Candidates:
    """The workers that could take a request, and what it would cost there: lists in one order,
    because a decision has no time for an object for each worker."""

    __slots__ = ("_block_size", "_cached", "_knows_caches", "_num_prompt_tokens", "need", "workers")

    def __init__(
        self,
        workers: list[WorkerBooks],
        request: RouteRequest,
        need: Role,
        cached: Mapping[str, int],
    ) -> None:
        """`cached`: leading blocks of the prompt that workers have, by id; none where not named.
        There is at least one worker, and all have blocks of one size."""
        self.workers = workers
        self.need = need
        self._cached = cached
        self._knows_caches = request.knows_caches
        self._block_size = workers[0].view.block_size
        self._num_prompt_tokens = request.num_prompt_tokens

    def __len__(self) -> int:
        return len(self.workers)

    def num_new_tokens(self, place: int) -> int:
        """At least one token of a prompt is always computed."""
        num_cached = self._cached.get(self.workers[place].id, 0)
        return self._num_prompt_tokens - self._block_size * num_cached or 1

    def num_new_blocks(self, place: int) -> int:
        return -(-self.num_new_tokens(place) // self._block_size)

    def keep(self, places: Sequence[int]) -> None:
        """Drops all others."""
        self.workers = [self.workers[place] for place in places]

    def costs(self, config: RouterConfig) -> list[float]:
        """Of `kv-aware`."""
        num_tokens, size = self._num_prompt_tokens, self._block_size
        of_token, of_block = config.prefill_weight / size, 1.0
        if self.need is Role.DECODE:
            of_token, of_block = 0.0, 1 + config.transfer_weight
        of_prompt = of_token * num_tokens + of_block * -(-num_tokens // size)
        saved = {i: (of_token * size + of_block) * num for i, num in self._cached.items()}
        for worker_id, num in self._cached.items():
            if num * size == num_tokens:  # of which one token is computed all the same
                saved[worker_id] -= of_token + of_block
        saved_by = saved.get
        if self.need is Role.DECODE:
            return [b.load.blocks + of_prompt - saved_by(b.id, 0.0) for b in self.workers]
        return [b.work + of_prompt - saved_by(b.id, 0.0) for b in self.workers]

    def describe(self, place: int) -> str:
        load, tokens = self.workers[place].load, f"{self._num_prompt_tokens} tokens of prompt"
        if self._knows_caches:
            new = self.num_new_tokens(place)
            tokens = f"{new} of {self._num_prompt_tokens} tokens to prefill"
        return (
            f"{tokens} behind {load.prefill_tokens}, {load.blocks} blocks held,"
            f" {load.requests} requests"
        )


def choose(
    config: RouterConfig, candidates: Candidates, random: Random, last_id: str
) -> tuple[int, list[float]]:
    """The place of the chosen worker, and the score of each (none where the policy does not
    compare). `last_id` is the worker chosen last."""
    policy = config.policy_for(candidates.need)
    if policy is Policy.ROUND_ROBIN:
        ids = [books.id for books in candidates.workers]
        return ids.index(min([i for i in ids if i > last_id] or ids)), []
    if policy is Policy.RANDOM:
        return random.randrange(len(candidates)), []
    scores = _score(config, candidates)
    if config.temperature > 0:
        weights = _softmax(scores, config.temperature)
        return random.choices(range(len(scores)), weights)[0], scores
    return _least(candidates, scores, random), scores


def _score(config: RouterConfig, candidates: Candidates) -> list[float]:
    policy = config.policy_for(candidates.need)
    if policy is Policy.LEAST_LOADED:
        return [(books.load.requests + 1) / books.view.num_slots for books in candidates.workers]
    if policy is Policy.INPUT_LENGTH:
        return [
            float(books.load.prefill_tokens + candidates.num_new_tokens(place))
            for place, books in enumerate(candidates.workers)
        ]
    return candidates.costs(config)


def _least(candidates: Candidates, scores: Sequence[float], random: Random) -> int:
    """The lowest score; among equals the fewest requests; among equals again, who was chosen
    longest ago, for idle workers to get the same over time; and any of those that never were, for
    frontends not to choose alike."""
    lowest = min(scores)
    if scores.count(lowest) == 1:
        return scores.index(lowest)
    best = [place for place, score in enumerate(scores) if score == lowest]
    requests = [candidates.workers[place].load.requests for place in best]
    fewest = min(requests)
    best = [place for place, num in zip(best, requests, strict=True) if num == fewest]
    longest_ago = min(candidates.workers[place].turn for place in best)
    return random.choice([p for p in best if candidates.workers[p].turn == longest_ago])


def _softmax(scores: Sequence[float], temperature: float) -> list[float]:
    """Weights that fall with the score; the range of scores is 1 before the temperature."""
    lowest = min(scores)
    scale = temperature * (max(scores) - lowest)
    return [math.exp((lowest - score) / scale) if scale else 1.0 for score in scores]
