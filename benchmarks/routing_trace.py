# SPDX-License-Identifier: Apache-2.0
"""A trace of conversations with shared beginnings, drawn from a seed, and what is known of it.

    conversation starts   Poisson, `rate_per_s`
    system prompt         that of one of `num_groups`, equally likely; uniform in `system_tokens`
    turns                 1 + geometric, mean `mean_turns`, at most `max_turns`
    user message          lognormal, median `user_median`, sigma 0.6, within [8, 1024] tokens
    answer                uniform in `answer_tokens`, exactly so long
    thinking              exponential, mean `mean_think_s`, between an answer and the next message

A turn's prompt is everything before it: the system prompt, earlier messages and the answers as the
model gave them. Tokens are random ids, so nothing but whole beginnings is shared.
"""

from dataclasses import asdict, dataclass
from random import Random
from statistics import mean, quantiles
from typing import Any

_FIRST_TOKEN, _LAST_TOKEN = 1000, 40_000
_SIGMA = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    num_conversations: int = 60
    rate_per_s: float = 0.5
    num_groups: int = 8
    system_tokens: tuple[int, int] = (128, 256)
    mean_turns: float = 8.0
    max_turns: int = 16
    user_median: int = 128
    answer_tokens: tuple[int, int] = (16, 32)
    mean_think_s: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    user_tokens: list[int]
    num_answer_tokens: int
    think_s: float
    """Before the message is sent; 0 for the first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    start_s: float
    group: int
    system_tokens: list[int]
    turns: list[Turn]


def make_trace(config: TraceConfig) -> list[Conversation]:
    random = Random(config.seed)
    systems = [
        _tokens(random, random.randint(*config.system_tokens)) for _ in range(config.num_groups)
    ]
    conversations, start_s = [], 0.0
    for _ in range(config.num_conversations):
        start_s += random.expovariate(config.rate_per_s)
        group = random.randrange(config.num_groups)
        num_turns = 1
        while num_turns < config.max_turns and random.random() > 1 / config.mean_turns:
            num_turns += 1
        turns = [_make_turn(random, config, number) for number in range(num_turns)]
        conversations.append(Conversation(start_s, group, systems[group], turns))
    return conversations


def make_independent(num_prompts: int, lengths: tuple[int, int], seed: int) -> list[list[int]]:
    """Prompts that have nothing in common, uniform in `lengths`."""
    random = Random(seed)
    return [_tokens(random, random.randint(*lengths)) for _ in range(num_prompts)]


def _make_turn(random: Random, config: TraceConfig, number: int) -> Turn:
    num_user = round(config.user_median * random.lognormvariate(0.0, _SIGMA))
    return Turn(
        _tokens(random, min(max(num_user, 8), 1024)),
        random.randint(*config.answer_tokens),
        random.expovariate(1 / config.mean_think_s) if number else 0.0,
    )


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Shape:
    """One turn's prompt by its length, and how much of it a perfect cache would have."""

    num_prompt_tokens: int
    num_reusable_tokens: int


def shapes_of(trace: list[Conversation], block_size: int) -> list[Shape]:
    """With one cache for all workers that forgets nothing and a turn that waits for no other. In
    full blocks; the last token of an answer is never in the cache, as nothing was computed from
    it."""
    shapes, seen = [], set[int]()
    for conversation in trace:  # by start: who comes first in a group finds nothing
        num_known = len(conversation.system_tokens) if conversation.group in seen else 0
        seen.add(conversation.group)
        num_before = len(conversation.system_tokens)
        for turn in conversation.turns:
            num_prompt = num_before + len(turn.user_tokens)
            num_reusable = min(num_known, num_prompt - 1) // block_size * block_size
            shapes.append(Shape(num_prompt, num_reusable))
            num_before = num_prompt + turn.num_answer_tokens
            num_known = num_before - 1
    return shapes


def ideal_hit_rate(shapes: list[Shape]) -> float:
    """Of the prompt tokens of the whole trace."""
    return sum(s.num_reusable_tokens for s in shapes) / sum(s.num_prompt_tokens for s in shapes)


def describe(config: TraceConfig, trace: list[Conversation], block_size: int) -> dict[str, Any]:
    shapes = shapes_of(trace, block_size)
    prompts = [shape.num_prompt_tokens for shape in shapes]
    answers = [turn.num_answer_tokens for c in trace for turn in c.turns]
    return {
        "config": asdict(config),
        "num_conversations": len(trace),
        "num_requests": len(shapes),
        "mean_turns": len(shapes) / len(trace),
        "mean_prompt_tokens": mean(prompts),
        "p50_prompt_tokens": quantiles(prompts, n=100)[49] if len(prompts) > 1 else prompts[0],
        "max_prompt_tokens": max(prompts),
        "mean_answer_tokens": mean(answers),
        "ideal_hit_rate": ideal_hit_rate(shapes),
        "block_size": block_size,
    }
