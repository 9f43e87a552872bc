# SPDX-License-Identifier: Apache-2.0
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from pelton.cli import chat as chat_module
from pelton.cli.chat import Chat
from pelton.cli.main import make_app
from pelton.core.errors import ContextLengthError
from pelton.core.request import SamplingParams


class EchoLLM:
    """Answers with what it was asked, word by word; `interrupt` stops it after the first one."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.sampling: SamplingParams | None = None
        self.interrupt = False

    def stream_chat(
        self, messages: Any, sampling: SamplingParams, on_reasoning: Callable[[str], None]
    ) -> Iterator[str]:
        self.asked.append(list(messages))
        self.sampling = sampling
        question = messages[-1]["content"]
        if question == "too long":
            raise ContextLengthError("The prompt is too long.")
        if question.startswith("think"):
            on_reasoning("hm")
        for word in f"you said {question}".split():
            yield word + " "
            if self.interrupt:
                raise KeyboardInterrupt

    def __enter__(self) -> "EchoLLM":
        return self

    def __exit__(self, *details: object) -> None:
        return None


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> EchoLLM:
    echo = EchoLLM()
    monkeypatch.setattr(chat_module, "_load", lambda config: echo)
    return echo


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(make_app(), ["chat", "smollm2", *arguments], input=stdin)


def test_one_question_prints_nothing_but_the_answer(llm: EchoLLM) -> None:
    result = run("--prompt", "hi", "--temperature", "0", "--max-tokens", "5", "--system", "Brief.")
    assert (result.exit_code, result.stdout) == (0, "you said hi \n")
    assert llm.asked == [
        [{"role": "system", "content": "Brief."}, {"role": "user", "content": "hi"}]
    ]
    assert (llm.sampling.temperature, llm.sampling.max_tokens) == (0, 5)


def test_reasoning_is_no_part_of_the_answer(llm: EchoLLM) -> None:
    result = run("--prompt", "think")
    assert (result.stdout, result.stderr) == ("you said think \n", "hm\n\n")


def test_piped_text_is_the_question(llm: EchoLLM) -> None:
    assert run(stdin="from a pipe").stdout == "you said from a pipe \n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to answer"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be an integer at least 1"),
        (["--prompt", "too long"], "too long"),
    ],
)
def test_errors_are_one_sentence_and_code_2(llm, arguments: list[str], message: str) -> None:
    result = run(*arguments, stdin=" ")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_an_unknown_model_is_code_2() -> None:
    result = CliRunner().invoke(make_app(), ["chat", "no-such-model", "--prompt", "x"])
    assert (result.exit_code, "no-such-model" in result.stderr) == (2, True)


def test_help_has_examples() -> None:
    result = CliRunner().invoke(make_app(), ["chat", "--help"])
    assert (result.exit_code, "pelton chat smollm2" in result.stdout) == (0, True)


@pytest.fixture
def converse(
    llm: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Types the lines given (an exception is raised in place of a line) until Ctrl-D."""

    def type_lines(*lines: str | type[BaseException]) -> tuple[str, str]:
        pending = iter(lines)

        def read_line(prompt: str) -> str:
            line = next(pending, EOFError)
            if isinstance(line, type):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read_line)
        chat_module._converse(Chat(llm, SamplingParams(), "Be brief."))
        captured = capsys.readouterr()
        return captured.out, captured.err

    return type_lines


def test_a_conversation_grows_and_is_forgotten(llm: EchoLLM, converse) -> None:
    output, _ = converse("one", "two", "", "/clear", "three", "/exit", "never read")
    assert output.endswith("you said one \nyou said two \nyou said three \n")
    assert [len(messages) for messages in llm.asked] == [2, 4, 2]
    assert llm.asked[1][2] == {"role": "assistant", "content": "you said one "}
    assert all(messages[0]["role"] == "system" for messages in llm.asked)


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(llm: EchoLLM, converse) -> None:
    llm.interrupt = True
    _, errors = converse("one", KeyboardInterrupt, "two")
    assert "(stopped)" in errors
    assert llm.asked[1][2]["content"] == "you "


def test_a_refused_question_is_taken_back(llm: EchoLLM, converse) -> None:
    _, errors = converse("too long", "short", "/unknown")
    assert "The prompt is too long. (/clear starts afresh)" in errors
    assert [message["content"] for message in llm.asked[1]] == ["Be brief.", "short"]
    assert "/exit leaves" in errors


def test_answers_show_as_they_are_made(llm: EchoLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    seen = []
    monkeypatch.setattr(written, "flush", lambda: seen.append(written.getvalue()))
    monkeypatch.setattr("sys.stdout", written)
    chat_module._print_stream(Chat(llm, SamplingParams()).answer("hi"))
    assert seen == ["you ", "you said ", "you said hi ", "you said hi \n"]
