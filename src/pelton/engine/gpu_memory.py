# SPDX-License-Identifier: Apache-2.0
"""What a GPU has left for KV: its share of memory, less all that was measured to be needed.

The order of measuring: weights are loaded already; then the largest prefills, the sampler with
every control at the most rows, steps of all sizes, so that kernels compile before a request waits
for one, and the captured graphs. All run on an executor whose KV pool has two blocks and which is
gone again when this returns.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from pelton.core.config import EngineConfig, resolved
from pelton.core.errors import CapacityError
from pelton.core.request import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from pelton.core.step import Admission, StepPlan
from pelton.engine.cuda_graphs import DecodeGraphs
from pelton.engine.model_runner import ModelRunner
from pelton.engine.staging import IntArray
from pelton.kernels.paged_attention.unpack_fp8 import UNPACKED_TOKENS
from pelton.layers.latent_rows import MIN_UNABSORBED_TOKENS, WORKSPACE_TOKENS

_log = logging.getLogger("pelton.engine")

_MIN_LONG_ROW = 192
"""New tokens of a row with which it surely uses a workspace, whatever its context."""
_MAX_SHORT_ROW, _SHORT_PREFIX = 160, 2048
"""New tokens of a row with which latent attention surely runs absorbed, behind so many others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    total_bytes: int
    """Of the card."""
    allowed_bytes: int
    """--memory-fraction of it."""
    resident_bytes: int
    """Weights, the driver's context, and other processes."""
    step_bytes: int
    """Static buffers and what the largest step allocates besides."""
    graph_bytes: int
    landing_bytes: int = 0
    """What KV from other workers lands in on its way to the pool."""

    @property
    def kv_bytes(self) -> int:
        needed = self.resident_bytes + self.step_bytes + self.graph_bytes + self.landing_bytes
        if needed >= self.allowed_bytes:
            raise CapacityError(
                f"--memory-fraction allows {self.allowed_bytes:,} of the card's"
                f" {self.total_bytes:,} bytes, and {needed:,} are needed before any KV:"
                f" {self.resident_bytes:,} for weights and other processes,"
                f" {self.step_bytes:,} for the largest step, {self.graph_bytes:,} for CUDA"
                f" graphs, {self.landing_bytes:,} for KV on its way; lower"
                " --max-num-batched-tokens or --max-num-requests, or free the card.",
                param="memory_fraction",
            )
        return self.allowed_bytes - needed


def measure_memory(
    config: EngineConfig,
    vocab_size: int,
    device: torch.device,
    make_probe: Callable[[], ModelRunner],
    landing_bytes: int = 0,
) -> MemoryUse:
    """`make_probe` builds an executor with the limits of `config`, which is resolved, and the
    smallest KV pool. `landing_bytes` are set aside."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    probe = make_probe()
    step_bytes = 0
    for plan in chain(largest_plans(config, vocab_size), plans_of_all_sizes(config)):
        probe.launch(plan).wait()
        step_bytes = torch.cuda.max_memory_allocated(device) - before
        _log.debug(
            "event=step_measured rows=%d tokens=%d peak=%d",
            plan.num_rows, sum(plan.num_tokens), step_bytes,
        )  # fmt: skip
    graph_bytes = _measure_graphs(device, probe) if probe.padding.graph_sizes else 0
    del probe
    # The executor holds its own bound method: only the collector ends it.
    gc.collect()
    torch.cuda.empty_cache()
    use = MemoryUse(
        total_bytes=total,
        allowed_bytes=int(total * config.cache.memory_fraction),
        resident_bytes=total - free,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        landing_bytes=landing_bytes,
    )
    _log.info(
        "event=memory_measured total=%d allowed=%d resident=%d step=%d graphs=%d landings=%d kv=%d",
        use.total_bytes, use.allowed_bytes, use.resident_bytes, use.step_bytes, use.graph_bytes,
        use.landing_bytes, use.kv_bytes,
    )  # fmt: skip
    return use


def _measure_graphs(device: torch.device, probe: ModelRunner) -> int:
    """The largest graphs, and a small one for each of the rest: they share their memory."""
    graphs = DecodeGraphs(probe.decode_eagerly, probe.draft_step, probe.input_builder.build_padding)
    sizes = sorted(probe.padding.graph_sizes, key=lambda size: size.num_tokens)
    most_logits = max(sizes, key=lambda size: size.num_logits)
    chosen = list(dict.fromkeys((sizes[-1], most_logits, sizes[0])))
    measured = []
    for size in chosen:
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(device)
        graphs.capture([size])
        torch.cuda.empty_cache()
        free_after, _ = torch.cuda.mem_get_info(device)
        measured.append(max(free_before - free_after, 0))
    # What other processes take meanwhile looks like a graph's; at least it is not multiplied.
    num_large = max(len(chosen) - 1, 1)
    return sum(measured[:num_large]) + min(measured) * (len(sizes) - num_large)


class _AnyToken:
    """A `core.grammar.TokenMatcher` of a grammar that allows every output."""

    error = ""

    def restart(self, token_ids: Sequence[int]) -> None:
        pass

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def fill_masks(self, masks: IntArray, drafts: Sequence[int] = ()) -> int:
        masks[:] = -1
        return len(masks)


def largest_plans(config: EngineConfig, vocab_size: int) -> Iterator[StepPlan]:
    """Steps on made-up tokens that use no block but the null block."""
    max_tokens = resolved(config.scheduler.max_num_batched_tokens)
    max_rows = resolved(config.scheduler.max_num_requests)
    max_len = resolved(config.model.max_model_len)
    # The sampler compiles for 32-bit logits where something changes them, else for the model's.
    unchanged = SamplingParams(top_p=0.9, min_p=0.01, logprobs=MAX_LOGPROBS, prompt_logprobs=1)
    everything = replace(
        unchanged,
        presence_penalty=0.5,
        logit_bias=dict.fromkeys(range(min(MAX_BIASED_TOKENS, vocab_size)), 1.0),
        min_tokens=max_len,
    )
    banned = tuple(range(min(MAX_STOP_TOKENS, vocab_size // 2)))
    longest = min(max_len - 1, max_tokens)
    whole = [longest] * (max_tokens // longest) + [max_tokens % longest]
    yield _prompts(0, [count for count in whole if count][:max_rows], 0, everything, banned)
    # Chunks behind prefixes that fill the workspaces of attention.
    half = max_len // 2
    num_filling = min(UNPACKED_TOKENS // (max_len - 1), max_tokens // _MIN_LONG_ROW)
    num_rows = min(max(-(-max_tokens // half), num_filling, 1), max_rows, max_tokens)
    num_new = min(max_tokens, num_rows * half)
    counts = _shares(num_new, num_rows)
    context_len = max(UNPACKED_TOKENS, num_new + WORKSPACE_TOKENS) // num_rows
    yield _prompts(1, counts, min(context_len, max_len - 1) - max(counts), unchanged)
    num_rows = min(max_rows, max_tokens)
    # The most rows share the budget: the sampler has a full step's hidden states beside it, and
    # absorbed, queries and results are latents, which take several times an un-absorbed row's.
    has_room = max_len > _SHORT_PREFIX + _MAX_SHORT_ROW
    longest = min(_MAX_SHORT_ROW if has_room else MIN_UNABSORBED_TOKENS - 1, max_len - 1)
    counts = _shares(min(max_tokens, num_rows * longest), num_rows)
    yield _prompts(2, counts, _SHORT_PREFIX if has_room else 0, everything, banned)
    yield _decodes(3, num_rows, max_len - 1, everything, banned)
    num_drafts = min(config.speculative.num_drafts, max_len - 2)
    if num_drafts > 0:
        rows = list(range(num_rows))
        # As many as the planner gives: half of what the rows leave of the budget.
        num_drafted = min((max_tokens - len(rows)) // 2 // num_drafts, len(rows))
        num_plain = len(rows) - num_drafted
        drafts: dict[int, Sequence[int]] = {
            row: [0] * num_drafts for row in range(num_plain, len(rows))
        }
        starts = [max_len - 1 - num_drafts] * len(rows)
        counts = [1] * num_plain + [1 + num_drafts] * num_drafted
        samples = [True] * len(rows)
        yield StepPlan(4, [], [], rows, starts, counts, samples, num_plain, drafts=drafts)


def _shares(count: int, num_rows: int) -> list[int]:
    return [count // num_rows + (row < count % num_rows) for row in range(num_rows)]


def _decodes(
    step: int,
    num_rows: int,
    start: int,
    sampling: SamplingParams,
    banned: tuple[int, ...] = (),
) -> StepPlan:
    """A token of each row behind `start` others. With tokens that are `banned`, there is a grammar
    as well."""
    rows = list(range(num_rows))
    matcher = _AnyToken() if banned else None
    admissions = [Admission(row, [0], 1, sampling, 0, banned, matcher) for row in rows]
    starts, ones, samples = [start] * num_rows, [1] * num_rows, [True] * num_rows
    return StepPlan(step, admissions, [], rows, starts, ones, samples, num_rows)


def _prompts(
    step: int,
    counts: list[int],
    start: int,
    sampling: SamplingParams,
    banned: tuple[int, ...] = (),
) -> StepPlan:
    """A chunk of each row's tokens behind `start` others, the last of its prompt; the prompts'
    log-probabilities, too. `banned` as for `_decodes`."""
    rows = list(range(len(counts)))
    matcher = _AnyToken() if banned else None
    prompts = [
        Admission(row, [0] * (start + count), start + count, sampling, 0, banned, matcher)
        for row, count in enumerate(counts)
    ]
    samples = [True] * len(rows)
    followed = [row for row, count in enumerate(counts) if count > 1]
    return StepPlan(step, prompts, [], rows, [start] * len(rows), counts, samples, 0, followed)


def plans_of_all_sizes(config: EngineConfig) -> Iterator[StepPlan]:
    """A token of a prompt alone; a decode beside as many tokens of a prompt as each power of two;
    several prompts of few tokens; at last, decodes alone of as many rows as each power of two,
    which with graphs their capture runs. Kernels are chosen by the size of a step, and none should
    compile in the middle of serving. The prompts' log-probabilities are asked for: such a step has
    no graph, for which it would be padded."""
    max_tokens = resolved(config.scheduler.max_num_batched_tokens)
    max_rows = resolved(config.scheduler.max_num_requests)
    max_len = resolved(config.model.max_model_len)
    plain = SamplingParams(temperature=0.0)
    longest = min(max_tokens, max_len - 1)
    sizes = [1, *(2**k + 1 for k in range(longest.bit_length()) if 2**k < longest)]
    for step, size in enumerate(sizes):
        num_decodes = int(size > 1 and max_rows > 1)
        num_new = size - num_decodes
        decodes = [Admission(1, [0, 0], 1, plain, 0, ())][:num_decodes]
        prompt = Admission(0, [0] * (num_new + 1), num_new + 1, plain, 0, ())
        admissions = [*decodes, prompt]
        yield StepPlan(
            step, admissions, [], [admission.slot for admission in admissions],
            [1] * num_decodes + [0], [1] * num_decodes + [num_new], [True] * num_decodes + [False],
            num_decodes, [num_decodes],
        )  # fmt: skip
    num_prompts = min(max_rows, 8)
    num_new = min(48, max_tokens // num_prompts, max_len - 1)
    if num_new > 0:
        yield _prompts(len(sizes), [num_new] * num_prompts, 0, plain)
    if not config.executor.cuda_graphs:
        for k in range(min(max_rows, max_tokens).bit_length()):
            yield _decodes(len(sizes) + 1 + k, 2**k, max_len - 1, plain)
