# SPDX-License-Identifier: Apache-2.0
"""The LLM object over an engine whose executor makes up tokens."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pelton.core.clock import ManualClock
from pelton.core.config import (
    AUTO,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from pelton.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from pelton.core.request import FinishReason, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.stand_in import StandInExecutor
from pelton.models.checkpoint import open_checkpoint
from pelton.models.registry import find_architecture
from pelton.serving.engine_options import make_engine_config
from pelton.serving.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=12)
HI = [{"role": "user", "content": "hi"}]


class InterruptibleExecutor(StandInExecutor):
    """Sends this process Ctrl-C, or fails, inside a step."""

    interrupt_at = fail_at = -1

    def launch(self, plan: Any) -> Any:
        if plan.step_id == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        if plan.step_id == self.fail_at:
            raise RuntimeError("the device is gone")
        return super().launch(plan)


@pytest.fixture
def executor() -> InterruptibleExecutor:
    return InterruptibleExecutor(400, clock=ManualClock(), eos_after=40)


@pytest.fixture
def llm(tiny_llama, executor) -> Iterator[LLM]:
    checkpoint = open_checkpoint(str(tiny_llama.single))
    architecture = find_architecture(checkpoint.config)
    geometry = architecture.config_from_hf(checkpoint.config).geometry()
    config = EngineConfig(
        model=ModelConfig(max_model_len=512),
        cache=CacheConfig(block_size=4, num_blocks=400, kv_memory_bytes=1),
        scheduler=SchedulerConfig(max_num_requests=8, max_num_batched_tokens=64, overlap=True),
    )
    engine = Engine(config, geometry, executor, ManualClock())
    with LLM.from_engine(engine, checkpoint) as llm:
        yield llm


def assert_clean(llm: LLM) -> None:
    stats = llm._local.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def generate(llm: LLM, prompts: Any, sampling: Any = GREEDY) -> Any:
    return llm.generate(prompts, sampling, progress=False)


def test_prompts_in_every_form_give_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there")
    results = [
        generate(llm, prompts)[0]
        for prompts in ("hello there", ["hello there"], ids, [ids], ("hello there",))
    ]
    assert {tuple(result.choices[0].token_ids) for result in results} == {
        tuple(results[0].choices[0].token_ids)
    }
    assert [result.prompt for result in results] == ["hello there"] * 2 + [None] * 2 + [
        "hello there"
    ]
    assert_clean(llm)


def test_results_keep_the_order_of_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {number}" * (1 + number % 3) for number in range(30)]
    sampling = [SamplingParams(temperature=0, max_tokens=1 + n % 7) for n in range(30)]
    results = generate(llm, prompts, sampling)
    assert [result.prompt for result in results] == prompts
    assert [len(result.choices[0].token_ids) for result in results] == [
        params.max_tokens for params in sampling
    ]
    for result in results:
        [choice] = result.choices
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert choice.finish_reason is FinishReason.LENGTH
    assert generate(llm, []) == []


def test_an_end_token_stops(llm: LLM) -> None:
    [result] = generate(llm, "x", SamplingParams(temperature=0))
    [choice] = result.choices
    assert (choice.finish_reason, choice.stop, len(choice.token_ids)) == ("stop", 1, 40)
    assert choice.text == llm.tokenizer.decode(choice.token_ids)


def test_stop_strings_cut_text_tokens_and_work(llm: LLM) -> None:
    full = generate(llm, "hello")[0].choices[0]
    stop = full.text[3:5]
    cut = full.text[: full.text.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=12, stop=(stop,), logprobs=0)
    [choice] = generate(llm, "hello", params)[0].choices
    assert (choice.text, choice.finish_reason, choice.stop) == (cut, "stop", stop)
    assert choice.token_ids == full.token_ids[: len(choice.token_ids)]
    assert len(choice.token_ids) < 12
    assert len(choice.logprobs) == len(choice.token_ids)
    assert stop in llm.tokenizer.decode(choice.token_ids)
    assert_clean(llm)


def test_choices_stop_one_by_one(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    texts = [choice.text for choice in generate(llm, "hello", params)[0].choices]
    assert len(set(texts)) == 3
    stop = texts[1][2:6]
    params = SamplingParams(n=3, seed=5, max_tokens=12, stop=(stop,))
    choices = generate(llm, "hello", params)[0].choices
    assert [choice.text for choice in choices] == [text.partition(stop)[0] for text in texts]
    assert_clean(llm)


def test_a_choice_that_stopped_computes_nothing_more(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=60, ignore_eos=True)
    stop = generate(llm, "hello", params)[0].choices[1].text[:4]
    num_before = llm._local.engine.stats().generated_tokens_total
    params = SamplingParams(n=2, seed=5, max_tokens=60, ignore_eos=True, stop=(stop,))
    first, second = generate(llm, "hello", params)[0].choices
    assert (len(first.token_ids), second.text) == (60, "")
    assert llm._local.engine.stats().generated_tokens_total - num_before < 90


def test_unseeded_requests_follow_the_models_seed(llm: LLM, tiny_llama, executor) -> None:
    sampled = SamplingParams(max_tokens=8)
    first, second = (generate(llm, "x", sampled)[0].choices[0].token_ids for _ in range(2))
    assert first != second
    again = LLM.from_engine(llm._local.engine, open_checkpoint(str(tiny_llama.single)))
    assert generate(again, "x", sampled)[0].choices[0].token_ids == first


def test_chat_renders_the_template_and_reuses_the_prefix(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a long question, long enough for several blocks"}]
    [result] = llm.chat(messages, GREEDY, progress=False)
    assert result.prompt == f"<|user|>{messages[0]['content']}<|end|><|assistant|>"
    assert result.num_cached_tokens == 0
    several = llm.chat([messages, HI], GREEDY, progress=False)
    assert several[0].choices == result.choices
    assert several[0].num_cached_tokens > 0
    [own] = llm.chat(HI, GREEDY, template="{{ messages[0].content }}", progress=False)
    assert own.prompt == "hi"


def test_streams_join_to_the_answer(llm: LLM) -> None:
    done: list[Any] = []
    pieces = list(llm.stream_chat(HI, GREEDY, done.append))
    [expected] = llm.chat(HI, GREEDY, progress=False)
    assert "".join(pieces) == done[0].choices[0].text == expected.choices[0].text
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        next(llm.stream_chat(HI, SamplingParams(n=2)))


def test_an_abandoned_stream_leaves_the_engine_clean(llm: LLM) -> None:
    stream = llm.stream_chat(HI, SamplingParams(max_tokens=400, temperature=0))
    next(stream)
    with pytest.raises(ConfigError, match="busy"):
        generate(llm, "x")
    stream.close()
    assert_clean(llm)
    generate(llm, "x")


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: generate(llm, [f"prompt {n}" for n in range(20)]),
        lambda llm: list(llm.stream_chat(HI, SamplingParams(max_tokens=100))),
    ],
    ids=["generate", "stream"],
)
def test_ctrl_c_leaves_the_engine_clean(llm: LLM, executor, call: Any) -> None:
    expected = generate(llm, "hello")[0].choices
    # Where the tests run in the background, a shell may have them ignore the signal.
    handler = signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    executor.interrupt_at = 15
    with pytest.raises(KeyboardInterrupt):
        call(llm)
    assert signal.getsignal(signal.SIGINT) is handler
    assert_clean(llm)
    assert generate(llm, "hello")[0].choices == expected


def test_one_bad_request_refuses_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        generate(llm, ["fine", "x" * 5000])
    with pytest.raises(InvalidRequestError, match="token id"):
        generate(llm, [[5], [400]])
    for prompts in ([3.5], [["a"]], [[True]], [None]):
        with pytest.raises(InvalidRequestError, match="prompts must be"):
            generate(llm, prompts)
    with pytest.raises(InvalidRequestError, match="one for each of the 2"):
        generate(llm, ["a", "b"], [GREEDY])
    assert_clean(llm)


def test_a_failed_or_closed_engine_is_not_used_again(llm: LLM, executor) -> None:
    executor.fail_at = 3
    with pytest.raises(RuntimeError, match="gone"):
        generate(llm, "x")
    with pytest.raises(ConfigError, match="closed or has failed"):
        generate(llm, "x")
    llm.close()
    llm.close()


def test_progress_is_drawn_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert captured.out.replace("seed=0\n", "") == ""
    assert "2/2" in captured.err
    assert "tokens/s" in captured.err


def test_options_find_their_node() -> None:
    config = make_engine_config(
        "m", dtype="float32", device=Device.CPU, max_num_requests=3, num_blocks="auto",
        memory_fraction=0.5, overlap=False,
    )  # fmt: skip
    assert config.model == ModelConfig(model="m", dtype=DType.FLOAT32)
    assert (config.executor.device, config.scheduler.max_num_requests) == (Device.CPU, 3)
    assert (config.cache.num_blocks, config.scheduler.overlap) == (AUTO, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "no setting tensor_parallel; the settings are block_size"),
        ({"dtype": "float8"}, "dtype must be 'auto' or 'float32' or 'bfloat16', got 'float8'"),
        ({"block_size": 16.0}, "block_size must be an integer"),
        ({"block_size": True}, "block_size must be an integer"),
        ({"block_size": 0}, "block-size must be between 1 and 256"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False"),
        ({"max_model_len": "long"}, "max_model_len must be an integer or 'auto'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine_config("m", **options)
