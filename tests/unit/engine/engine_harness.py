# SPDX-License-Identifier: Apache-2.0
"""What the engine's tests share: small geometries and configs, and an executor that checks KV.

`CheckingExecutor` keeps a simulated KV memory: a token's place holds its position and a hash of
the tokens up to it. Before it samples, a row reads through its block tables everything that its
windows let it see; reading anything but its own history is an assertion error. So a block that
was reused too early, shared wrongly or never written shows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.core.clock import ManualClock
from pelton.core.config import (
    CacheConfig,
    DraftMethod,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.core.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from pelton.core.step import Admission, StepPlan, StepResult
from pelton.engine.engine import Engine

VOCAB_SIZE = 24
EOS = 0
POISON = VOCAB_SIZE - 1
"""A prompt that holds this token has logits that are not finite."""


def make_geometry(
    windows: Sequence[int] = (0,), vocab_size: int = VOCAB_SIZE, max_context: int = 64
) -> ModelGeometry:
    return ModelGeometry(
        name="tiny",
        architecture="none",
        num_layers=len(windows),
        hidden_size=1,
        num_heads=1,
        vocab_size=vocab_size,
        max_context=max_context,
        num_parameters=1,
        kv_groups=tuple(
            KVGroup(name=f"group{g}", layers=(g,), num_kv_heads=1, head_dim=1, window=window)
            for g, window in enumerate(windows)
        ),
        bos_token_id=None,
        eos_token_ids=(EOS,),
    )


def make_config(
    *,
    max_model_len: int = 64,
    block_size: int = 4,
    num_blocks: int = 200,
    prefix_cache: bool = True,
    slots: int = 8,
    budget: int = 32,
    overlap: bool = False,
    speculative: str = "off",
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="tiny", max_model_len=max_model_len),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            kv_memory_bytes=1,
            prefix_cache=prefix_cache,
        ),
        scheduler=SchedulerConfig(
            max_num_requests=slots, max_num_batched_tokens=budget, overlap=overlap
        ),
        speculative=SpeculativeConfig(speculative=speculative),
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    seed: int = 0,
    **sampling: object,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=seed,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
    )


def history_hash(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens))


def next_token(history: Sequence[int], seed: int, banned: Sequence[int]) -> int:
    token = hash((history_hash(history), seed)) % (VOCAB_SIZE - 1)
    while token in banned:
        token = (token + 1) % (VOCAB_SIZE - 1)
    return token


def logprobs_of(history: Sequence[int], token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(history_hash(history) % 97), 1, [])


def expected_tokens(
    request: GenerateRequest, seed: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """The output of one choice by the definition of the sampling parameters, engine apart."""
    sampling = request.sampling
    stops = list(sampling.stop_token_ids) + ([] if sampling.ignore_eos else [EOS])
    tokens: list[int] = []
    while True:
        history = request.prompt_token_ids + tokens
        banned = stops if len(tokens) < sampling.min_tokens else []
        tokens.append(next_token(history, seed, banned))
        if tokens[-1] in stops:
            return tokens, FinishReason.STOP
        if len(history) + 1 == max_model_len or len(tokens) == sampling.max_tokens:
            return tokens, FinishReason.LENGTH


@dataclass
class CheckedSlot:
    admission: Admission
    tokens: list[int]
    tables: list[dict[int, int]]


@dataclass
class Ready:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass
class CheckingExecutor:
    config: EngineConfig
    geometry: ModelGeometry
    plans: list[StepPlan] = field(default_factory=list)
    slots: dict[int, CheckedSlot] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> Ready:
        self.plans.append(plan)
        self._check_shape(plan)
        for admission in plan.admissions:
            tables: list[dict[int, int]] = [{} for _ in self.geometry.kv_groups]
            self.slots[admission.slot] = CheckedSlot(admission, list(admission.token_ids), tables)
        for update in plan.block_updates:
            assert update.block_id != 0, "the null block in a block table"
            self.slots[update.slot].tables[update.group][update.entry] = update.block_id
        self._write(plan)
        self._check_reads(plan)
        return Ready(self._sample(plan))

    def _check_shape(self, plan: StepPlan) -> None:
        budget = self.config.scheduler.max_num_batched_tokens
        assert sum(plan.num_tokens) <= budget, "over the token budget"
        assert len(set(plan.slots)) == len(plan.slots) <= self.config.scheduler.max_num_requests
        assert len(plan.starts) == len(plan.num_tokens) == len(plan.samples) == plan.num_rows > 0
        assert min(plan.num_tokens) >= 1
        assert plan.num_tokens[: plan.num_decodes] == [1] * plan.num_decodes
        assert all(plan.samples[: plan.num_decodes])
        num_drafted = len(plan.drafts)
        assert list(plan.drafts) == list(range(plan.num_decodes, plan.num_decodes + num_drafted))
        for row, drafts in plan.drafts.items():
            assert 1 <= len(drafts) <= self.config.speculative.num_drafts
            assert (plan.samples[row], plan.num_tokens[row]) == (True, 1 + len(drafts))
            assert all(0 <= token < VOCAB_SIZE for token in drafts)
        admitted = [admission.slot for admission in plan.admissions]
        assert len(set(admitted)) == len(admitted)
        assert set(admitted) <= set(plan.slots), "a request was admitted to do nothing"
        places = [update[:3] for update in plan.block_updates]
        assert len(set(places)) == len(places), "an entry was updated twice in one step"

    def _write(self, plan: StepPlan) -> None:
        block_size = self.config.cache.block_size
        writers: dict[tuple[int, int], int] = {}
        for row, slot_id in enumerate(plan.slots):
            slot = self.slots[slot_id]
            end = plan.starts[row] + plan.num_tokens[row]
            tokens = slot.tokens + plan.drafts.get(row, [])
            assert end <= len(tokens), f"row {row} computes a token that nobody knows"
            assert plan.samples[row] == (end == len(tokens))
            for position in range(plan.starts[row], end):
                entry, offset = divmod(position, block_size)
                content = (position, history_hash(tokens[: position + 1]))
                for g, table in enumerate(slot.tables):
                    assert writers.setdefault((g, table[entry]), row) == row, "two writers"
                    self.memory[g, table[entry], offset] = content

    def _check_reads(self, plan: StepPlan) -> None:
        block_size = self.config.cache.block_size
        for row, slot_id in enumerate(plan.slots):
            slot = self.slots[slot_id]
            tokens = slot.tokens + plan.drafts.get(row, [])
            start = plan.starts[row]
            for g, group in enumerate(self.geometry.kv_groups):
                first = max(0, start - group.window + 1) if group.window else 0
                for position in range(first, start + plan.num_tokens[row]):
                    entry, offset = divmod(position, block_size)
                    found = self.memory[g, slot.tables[g][entry], offset]
                    expected = (position, history_hash(tokens[: position + 1]))
                    assert found == expected, f"row {row} reads foreign KV at {position}"

    def _sample(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step_id, [])
        for row, slot_id in enumerate(plan.slots):
            slot = self.slots[slot_id]
            admission = slot.admission
            if row in plan.prompt_logprob_rows:
                first = plan.starts[row] + 1
                last = min(first + plan.num_tokens[row], admission.num_prompt_tokens)
                result.prompt_logprobs[row] = [
                    logprobs_of(slot.tokens[:position], slot.tokens[position])
                    for position in range(first, last)
                ]
            if not plan.samples[row]:
                result.sampled.append([])
                continue
            new, logprobs = [], []
            for guess in (*plan.drafts.get(row, []), None):
                token = self._next(slot, slot.tokens)
                logprobs.append(logprobs_of(slot.tokens, token))
                slot.tokens.append(token)
                new.append(token)
                if token != guess:
                    break
            if admission.sampling.logprobs is not None:
                result.logprobs[row] = logprobs
            if POISON in slot.tokens:
                result.failed_rows[row] = "The logits were not finite."
            result.sampled.append([] if row in result.failed_rows else new)
            if self.config.speculative.method is DraftMethod.MTP:
                result.drafts[row] = self._draft(slot)
        return result

    def _next(self, slot: CheckedSlot, tokens: list[int]) -> int:
        admission = slot.admission
        num_outputs = len(tokens) - admission.num_prompt_tokens
        is_early = num_outputs < admission.sampling.min_tokens
        return next_token(tokens, admission.seed, admission.eos_token_ids if is_early else ())

    def _draft(self, slot: CheckedSlot) -> list[int]:
        """Guesses that are right two times in three."""
        tokens = list(slot.tokens)
        for _ in range(self.config.speculative.num_drafts):
            guess = self._next(slot, tokens)
            is_wrong = history_hash(tokens) % 3 == 0
            tokens.append((guess + 1) % VOCAB_SIZE if is_wrong else guess)
        return tokens[len(slot.tokens) :]


@dataclass
class Collected:
    """What came back for one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: RequestOutput | None = None


class Harness:
    """An engine over a checking executor; collects outputs and checks each one's form."""

    def __init__(self, config: EngineConfig, geometry: ModelGeometry | None = None) -> None:
        self.config = config
        self.geometry = make_geometry() if geometry is None else geometry
        self.clock = ManualClock()
        self.executor = CheckingExecutor(config, self.geometry)
        self.engine = Engine(config, self.geometry, self.executor, self.clock)
        self.outputs: dict[tuple[str, int], Collected] = {}
        self.num_idle_blocks = self.num_free_blocks

    @property
    def num_free_blocks(self) -> int:
        stats = self.engine.stats()
        return stats.num_blocks - stats.num_used_blocks

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine._scheduler._running.tables.check()
        for output in outputs:
            self._collect(output)
        return outputs

    def run(self, *requests: GenerateRequest, max_steps: int = 3000) -> None:
        for request in requests:
            self.engine.add(request)
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.engine.stats()}")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.outputs[request_id, index].token_ids

    def finish(self, request_id: str, index: int = 0) -> FinishReason | None:
        last = self.outputs[request_id, index].last
        assert last is not None, "no output carried a finish reason"
        return last.finish_reason

    def assert_idle(self) -> None:
        """Nothing runs, and everything that was taken was given back."""
        assert not self.engine.has_work
        assert self.num_free_blocks == self.num_idle_blocks
        assert self.engine.stats().num_running == self.engine.stats().num_waiting == 0

    def _collect(self, output: RequestOutput) -> None:
        collected = self.outputs.setdefault((output.request_id, output.index), Collected())
        assert collected.last is None, f"{output} after {collected.last}"
        assert output.token_ids or output.finish_reason, "an empty output"
        collected.token_ids += output.token_ids
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            collected.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            assert collected.prompt_logprobs is None, "prompt_logprobs came twice"
            assert output.index == 0
            collected.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            collected.last = output
