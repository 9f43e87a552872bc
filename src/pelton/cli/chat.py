# SPDX-License-Identifier: Apache-2.0
"""`pelton chat`: talk to a model in the terminal, or ask it one thing in a pipe."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pelton.cli.options import Settings, with_settings
from pelton.core.config import EngineConfig
from pelton.core.errors import InvalidRequestError
from pelton.core.request import SamplingParams

if TYPE_CHECKING:
    from pelton.serving.llm import LLM

# One line a paragraph: the terminal's width decides where it breaks.
_HELP = "\n\n".join(
    (
        "Talk to MODEL in the terminal.",
        "The answer streams as it is made; Ctrl-C stops it and the conversation goes on. "
        "/clear forgets the conversation, /exit (or Ctrl-D) leaves. With --prompt, or with text "
        "on stdin, it answers once and prints nothing but the answer.",
        "Examples:",
        "  pelton chat smollm2",
        '  pelton chat smollm2 --system "Answer in one sentence." --temperature 0',
        '  pelton chat smollm2 --prompt "Name three rivers in France." --max-tokens 64',
        '  git log -5 | pelton chat ./Llama-3.1-8B-Instruct --system "Summarise this."',
    )
)
_COMMANDS = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    app.command("chat", help=_HELP)(_chat)


@with_settings(EngineConfig)
def _chat(
    settings: Settings,
    prompt: Annotated[
        str, typer.Option(help="Ask this, print the answer, and leave.", metavar="TEXT")
    ] = "",
    system: Annotated[
        str, typer.Option(help="System message; empty: the template's own.", metavar="TEXT")
    ] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Share of probability to sample from.")] = 0.95,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    is_one_shot = bool(prompt) or not sys.stdin.isatty()
    question = prompt or (sys.stdin.read() if is_one_shot else "")
    if is_one_shot and not question.strip():
        raise InvalidRequestError("There is nothing to answer: give --prompt or text on stdin.")
    with _load(settings[EngineConfig]) as llm:
        chat = Chat(llm, sampling, system)
        if is_one_shot:
            _print_stream(chat.answer(question))
        else:
            _converse(chat)


def _load(config: EngineConfig) -> "LLM":
    """torch is imported here and not before: `--help` and wrong options answer at once."""
    from rich.console import Console

    with Console(stderr=True).status(f"loading {config.model.label}"):
        from pelton.engine.factory import make_engine
        from pelton.models.checkpoint import open_checkpoint
        from pelton.serving.llm import LLM

        checkpoint = open_checkpoint(config.model.model)
        return LLM.from_engine(make_engine(config), checkpoint)


class Chat:
    """One conversation: the messages so far and how answers are sampled."""

    def __init__(self, llm: "LLM", sampling: SamplingParams, system: str = "") -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self._is_reasoning = False
        self.clear()

    def clear(self) -> None:
        self.messages = list(self._system)

    def answer(self, question: str) -> Iterator[str]:
        """The answer in pieces. However it ends, what there is of it joins the conversation; a
        question without any answer is taken back."""
        messages = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        self._is_reasoning = False
        try:
            for piece in self._llm.stream_chat(
                messages, self._sampling, on_reasoning=self._show_reasoning
            ):
                if self._is_reasoning:
                    self._is_reasoning = False
                    typer.echo("\n", err=True)
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self.messages = [*messages, answer]

    def _show_reasoning(self, text: str) -> None:
        """Beside the answers: it is no part of them, nor of the conversation."""
        self._is_reasoning = True
        typer.secho(text, dim=True, err=True, nl=False)


def _converse(chat: Chat) -> None:
    import readline  # noqa: F401  # editing and history for input()

    typer.secho(_COMMANDS, dim=True, err=True)
    while True:
        try:
            question = input("> ").strip()
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            typer.echo()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/clear":
            chat.clear()
            typer.secho("(forgotten)", dim=True, err=True)
        elif question.startswith("/") and " " not in question:
            typer.secho(_COMMANDS, dim=True, err=True)
        elif question:
            _answer_and_go_on(chat, question)


def _answer_and_go_on(chat: Chat, question: str) -> None:
    try:
        _print_stream(chat.answer(question))
    except KeyboardInterrupt:
        typer.secho("\n(stopped)", dim=True, err=True)
    except InvalidRequestError as error:  # such as a conversation that outgrew the context
        typer.secho(f"error: {error.message} (/clear starts afresh)", err=True)


def _print_stream(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
