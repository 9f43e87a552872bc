# SPDX-License-Identifier: Apache-2.0
"""Data sets: what is bundled, what files may hold, what synthetic prompts are."""

from pathlib import Path

import pytest

from pelton.bench.traffic import load_data_set, make_synthetic
from pelton.core.errors import ConfigError


def test_bundled_prompts_are_many_and_different() -> None:
    samples = load_data_set("prompts").samples
    texts = [sample.messages[0]["content"] for sample in samples if sample.messages]

    assert len(set(texts)) == len(samples) >= 100


def test_passages_are_prose_of_bounded_length() -> None:
    samples = load_data_set("passages").samples
    lengths = [len(sample.messages[0]["content"].split()) for sample in samples if sample.messages]

    assert len(samples) == 100
    assert min(lengths) > 100
    assert max(lengths) < 250


def test_the_bundled_set_holds_both_and_its_hash_repeats() -> None:
    first, second = load_data_set("bundled"), load_data_set("bundled")

    assert len(first.samples) == len(load_data_set("prompts").samples) + 100
    assert first.sha256 == second.sha256
    assert not first.is_synthetic


def test_output_len_caps_a_data_set() -> None:
    samples = load_data_set("prompts", output_len=16).samples

    assert {sample.max_tokens for sample in samples} == {16}
    assert not any(sample.ignore_eos for sample in samples)


def test_synthetic_prompts_repeat_with_their_seed_only() -> None:
    def make(seed: int) -> str:
        return make_synthetic(input_len=20, output_len=5, seed=seed, vocab_size=1000).sha256

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_synthetic_prompts_have_the_lengths_asked_for() -> None:
    data_set = make_synthetic(input_len=20, output_len=5, seed=0, vocab_size=1000)

    assert data_set.is_synthetic
    assert data_set.seed == 0
    for sample in data_set.samples:
        assert sample.input_tokens is not None
        assert len(sample.input_tokens) == 20
        assert all(250 <= token_id < 1000 for token_id in sample.input_tokens)
        assert sample.max_tokens == 5
        assert sample.ignore_eos


def test_a_file_may_mix_the_three_kinds(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        '{"prompt": "once"}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}\n'
        '{"input_tokens": [1, 2, 3]}\n'
    )
    samples = load_data_set(str(path)).samples

    assert [sample.max_tokens for sample in samples] == [128, 9, 128]
    assert samples[0].prompt == "once"
    assert samples[2].input_tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "colour": "red"}', "unknown field `colour`"),
        ('{"prompt": "a", "input_tokens": [1]}', "found prompt and input_tokens"),
        ("{}", "found none"),
        ('{"prompt": ""}', "prompt must not be empty"),
        ('{"prompt": "a", "max_tokens": 1}', "at least 2"),
        ('{"prompt": 7}', "Expected `str"),
        ('{"input_tokens": ["a"]}', "Expected `int`"),
        ('{"input_tokens": [-1]}', "negative"),
        ("nonsense", "line 2: JSON is malformed"),
        ('["prompt"]', "Expected `object`"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")

    with pytest.raises(ConfigError, match="line 2") as raised:
        load_data_set(str(path))

    assert words in raised.value.message


@pytest.mark.parametrize(
    ("name", "words"),
    [("no-such.jsonl", "cannot be read"), ("squad", "must be 'bundled'")],
)
def test_an_unknown_data_set_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_data_set(name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")

    with pytest.raises(ConfigError, match="no rows"):
        load_data_set(str(path))
