# SPDX-License-Identifier: Apache-2.0
"""`pelton eval`: tasks that are read or refused by line, and scores beside transformers'."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from pelton.bench.evaluation.run import evaluate
from pelton.bench.evaluation.task import Text, read_task
from pelton.cli.main import make_app
from pelton.core.errors import ConfigError, InvalidRequestError

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
        ("{", "this is not JSON: Expecting property name .* at character 2"),
        ('{"text": "a"} x', "not JSON: Extra data at character 15"),
        ("NaN", "an object is expected"),
        ("[" * 5000, "recursion"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ({"text": "x", "answer": "y"}, "one of these sets"),
        ({"messages": [], "answer": "x"}, "role and content"),
        ({"prompt": "x", "answer": []}, "answer must be a text"),
        ({"prompt": "x", "choices": ["a", ""], "answer": 0}, "none of them empty"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": True}, "0 to 1"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": "b"}, "0 to 1"),
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


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r":2: byte 11 is not UTF-8\.$"):
        read_task(path)


def test_only_line_breaks_end_lines_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    text = "a\u2028b\x85c"
    lines = [json.dumps({"text": text}, ensure_ascii=False), '{"text": "d"}\r', ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())

    assert read_task(path) == [Text(line=1, text=text), Text(line=2, text="d")]


class Scripted:
    """As much of an `LLM` as scoring takes. A token is a byte, and its log-probability -(b % 4)
    bits; it answers with what follows the prompt's last word in `ANSWERS`."""

    ANSWERS: ClassVar = {"2+2": " 4\n", "2+3": "6"}
    config = SimpleNamespace(model=SimpleNamespace(max_model_len=64))
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "robot":
            raise InvalidRequestError("The template knows no robot.", param="messages")
        return list(messages[-1]["content"].encode())

    def generate(self, prompts: list[list[int]], sampling: Any, *, progress: bool) -> list[Any]:
        bits = [[-(b % 4) * math.log(2) for b in prompt] for prompt in prompts]
        return [
            SimpleNamespace(
                prompt_logprobs=[None, *(SimpleNamespace(logprob=v) for v in values[1:])],
                choices=[SimpleNamespace(text=self.ANSWERS.get(bytes(p).decode()), error=None)],
            )
            for p, values in zip(prompts, bits, strict=True)
        ]

    def chat(self, conversations: Any, sampling: Any, *, progress: bool) -> list[Any]:
        prompts = [self.encode_chat(messages) for messages in conversations]
        return self.generate(prompts, sampling, progress=progress)


def score(tmp_path: Path, lines: list[Any]) -> dict[str, Any]:
    items = read_task(write(tmp_path / "task.jsonl", lines))
    llm: Any = Scripted()
    return evaluate(llm, items, max_tokens=9, progress=False, source="f").to_dict()


def test_scores_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    scores = score(
        tmp_path,
        [
            {"text": "abcd"},  # 2 + 3 + 0 bits over 3 tokens
            {"text": "bb"},  # 2 bits over 1 token
            {"prompt": "2+2", "answer": "4"},
            {"messages": [{"role": "user", "content": "2+3"}], "answer": ["5", "five"]},
            {"prompt": "x", "choices": ["a", "bd", "ded"], "answer": 0},  # 1, 2 and 1 bits
            {"prompt": "x", "choices": ["a", "ded"], "answer": 1},  # 1/1 and 1/3 bits a byte
        ],
    )

    perplexity = scores["perplexity"]
    assert perplexity["perplexity"] == pytest.approx(2 ** (7 / 4))
    assert perplexity["bits_per_byte"] == pytest.approx(7 / 6)
    assert (perplexity["num_tokens"], perplexity["num_items"]) == (4, 2)
    assert scores["items"][0]["perplexity"] == pytest.approx(2 ** (5 / 3))
    assert scores["exact_match"] == {
        "accuracy": 0.5, "standard_error": pytest.approx(0.5), "num_items": 2
    }  # fmt: skip
    choice = scores["multiple_choice"]
    assert (choice["accuracy"], choice["accuracy_per_byte"]) == (0.5, 0.5)
    assert [item.get("picked") for item in scores["items"][4:]] == [0, 0]
    assert [v / -math.log(2) for v in scores["items"][4]["logprobs"]] == pytest.approx([1, 2, 1])
    assert [item["line"] for item in scores["items"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"text": "a"}, "f:1: a text of one token has no perplexity"),
        ({"text": "x" * 64}, "f:1: 64 tokens do not fit the context of 64"),
        ({"prompt": "x", "choices": ["a", "b" * 99], "answer": 0}, "f:1: 100 tokens do not fit"),
        ({"messages": [{"role": "robot", "content": "x"}], "answer": "x"}, "f:1: The template"),
    ],
)
def test_what_cannot_be_scored_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        score(tmp_path, [line])


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
    task = write(tmp_path / "good.jsonl", LINES)
    done = run("no-such-model", "--task", str(task), "--out", str(tmp_path / "none" / "x.json"))
    assert done.exit_code == 2
    assert "name a file in a folder that exists" in done.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mtp:1", "mtp:1 needs a model with an MTP layer"),
        *((bad, "ngram:K' with K from 1 to 8") for bad in ("ngram:0", "ngram:-1", "ngram:999")),
        *((bad, "mtp:K' with K from 1 to 4") for bad in ("mtp:5", "mtp:0", "mtp:x", "mtp")),
        *((bad, "must be 'off'") for bad in ("eagle:3", "", "OFF", "ngram:3:4", "ngram: 3")),
    ],
)
def test_drafting_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, tiny_llama, given: str, words: str
) -> None:
    task = write(tmp_path / "task.jsonl", LINES)
    done = run(str(tiny_llama.single), "--task", str(task), "--speculative", given)
    assert done.exit_code == 2
    [sentence] = done.output.strip().splitlines()
    assert words in sentence
    assert "--speculative" in sentence
    assert "ngram" in sentence
