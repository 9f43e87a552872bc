# SPDX-License-Identifier: Apache-2.0
"""`pelton demo`: serve the bundled model, ask it something, measure it, say where the report is."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pelton.cli.options import user_errors
from pelton.core.errors import ConfigError, PeltonError

if TYPE_CHECKING:
    from rich.console import Console

_HELP = "\n\n".join(
    (
        "Serve the bundled model, ask it a question, and measure it with LoadGen.",
        "Takes about three minutes on two CPU cores and needs no network. The exit code is that "
        "of pelton bench: 0 for a VALID run.",
    )
)
_QUESTION = "What is a lighthouse for? Answer in two sentences."
_MAX_ANSWER_TOKENS = 96
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_READY_LINE = re.compile(r"Ready at (?P<url>http://\S+)")


class DemoError(PeltonError):
    """The server could not be started or asked."""


def register(app: typer.Typer) -> None:
    app.command(help=_HELP)(demo)


def demo(
    out: Annotated[str, typer.Option(help="Folder for the record and the report.")] = "demo-report",
    model: Annotated[
        str, typer.Option(help="What to serve; as MODEL of pelton serve.")
    ] = "smollm2",
) -> None:
    from rich.console import Console

    console = Console()
    with user_errors():
        try:
            exit_code = _run(model, out, console)
        except KeyboardInterrupt:
            exit_code = 130
        except ConfigError:
            raise
        except PeltonError as error:
            typer.echo(f"error: {error.message}", err=True)
            exit_code = 1
    raise typer.Exit(exit_code)


def _run(model: str, out: str, console: "Console") -> int:
    import asyncio

    from rich.console import Console

    from pelton.bench.config import BenchConfig, ScenarioName
    from pelton.cli.bench import import_harness, print_outcome
    from pelton.core.config import CacheConfig, EngineConfig, ModelConfig

    run_bench = import_harness()
    from pelton.bench.demo_load import DATA_SET, TPOT_MS, TTFT_MS, choose_load

    with _serve(model, console) as url:
        console.print(f"\nYou: {_QUESTION}")
        console.print(f"{model}: {_ask(url, model)}\n", highlight=False, markup=False)
        with console.status("Finding a load that this machine holds"):
            load = asyncio.run(choose_load(url, model))
        console.print(
            f"Offering {load.qps:.1f} requests/s for about {load.duration_s:.0f} s: "
            f"{load.num_requests} requests of the bundled prompts, up to {load.output_len} tokens "
            "each.",
            highlight=False,
        )
        bench = BenchConfig(
            scenario=ScenarioName.SERVER,
            url=url,
            out=out,
            qps=load.qps,
            ttft_ms=TTFT_MS,
            tpot_ms=TPOT_MS,
            requests=load.num_requests,
            dataset=DATA_SET,
            output_len=load.output_len,
        )
        engine = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(prefix_cache=False))
        outcome = run_bench(bench, engine, Console(stderr=True))
    print_outcome(outcome, console)
    return outcome.exit_code


@contextmanager
def _serve(model: str, console: "Console") -> Iterator[str]:
    """`pelton serve` on a free port for as long as the context lasts; yields its URL."""
    command = [sys.executable, "-P", "-m", "pelton.cli.main", "serve", model, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--log-level", "warning"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
    )  # fmt: skip
    try:
        with console.status(f"pelton serve {model}"):
            url = _wait_ready(server)
        console.print(f"pelton serve {model} is ready at {url}", highlight=False)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_ready(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    for line in server.stdout:
        match = _READY_LINE.search(line)
        if match:
            return match["url"]
    raise DemoError("The server ended before it was ready; its own message is above.")


def _ask(url: str, model: str) -> str:
    import json
    import urllib.error
    import urllib.request

    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_completion_tokens": _MAX_ANSWER_TOKENS,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
            reply: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise DemoError(f"The server did not answer a chat question: {error}.") from error
    return str(reply["choices"][0]["message"]["content"]).strip()
