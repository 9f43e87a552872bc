# SPDX-License-Identifier: Apache-2.0
"""`pelton eval`: tasks that are read or refused by line, and scores beside transformers'."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from pelton.bench.evaluation.task import read_task
from pelton.cli.main import make_app
from pelton.core.errors import ConfigError

LINES: list[dict[str, Any]] = [
    {"prompt": "hello", "choices": [" you", " a", " longer one"], "answer": 1},
    {"text": "A text of some length, which is scored."},
    {"prompt": "abc", "answer": ["x", "y"]},
    {"text": "Another."},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "an object is expected"),
        ({"prompt": "x"}, "one of these sets"),
        ({"text": ""}, "text must be a text"),
        ({"prompt": "x", "choices": ["a"], "answer": 0}, "two or more"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "0 to 1"),
        ({"prompt": "x", "answer": 4}, "answer must be a text"),
        ({"messages": [{"role": "user"}], "answer": "x"}, "role and content"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "task.jsonl", [LINES[1], "", line])
    with pytest.raises(ConfigError, match=reason) as caught:
        read_task(path)
    assert f"{path}:3: " in caught.value.message


def test_an_empty_or_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tasks"):
        read_task(write(tmp_path / "empty.jsonl", [""]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_task(tmp_path / "absent.jsonl")


def run(*arguments: str) -> Any:
    options = ["--dtype", "float32", "--kv-memory-bytes", "16MiB", "--max-model-len", "128"]
    return CliRunner().invoke(make_app(), ["eval", *arguments, *options])


def test_scores_are_those_of_the_reference(tmp_path: Path, tiny_llama) -> None:
    task, out = write(tmp_path / "task.jsonl", LINES), tmp_path / "result.json"

    done = run(str(tiny_llama.single), "--task", str(task), "--out", str(out), "--max-tokens", "4")

    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    from pelton.models.checkpoint import open_checkpoint
    from pelton.serving.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(open_checkpoint(str(tiny_llama.single)))
    model = LlamaForCausalLM.from_pretrained(tiny_llama.single, dtype=torch.float32).eval()

    def logprobs(text: str) -> list[float]:
        ids = torch.tensor(tokenizer.encode(text))
        with torch.inference_mode():
            rows = model(ids[None]).logits[0].log_softmax(-1)
        return [float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1)]

    texts = [logprobs(line["text"]) for line in LINES if "text" in line]
    expected = math.exp(-sum(map(sum, texts)) / sum(map(len, texts)))
    assert math.isclose(result["perplexity"]["perplexity"], expected, rel_tol=TOLERANCE)
    whole = [sum(logprobs("hello" + choice)) for choice in LINES[0]["choices"]]
    differences = [value - whole[0] for value in whole]
    found = result["items"][0]["logprobs"]
    for value, difference in zip(found, differences, strict=True):
        assert math.isclose(value - found[0], difference, abs_tol=TOLERANCE)
    assert result["multiple_choice"]["num_items"] == 1
    assert result["exact_match"]["accuracy"] == 0
    assert [item["line"] for item in result["items"]] == [1, 2, 3, 4]


TOLERANCE = 0.001


def test_errors_end_with_one_sentence_and_code_2(tmp_path: Path, tiny_llama) -> None:
    task = write(tmp_path / "task.jsonl", [{"text": "x" * 4000}])
    done = run(str(tiny_llama.single), "--task", str(task))
    assert done.exit_code == 2
    assert f"{task}:1: " in done.output
    assert "do not fit the context of 128" in done.output
