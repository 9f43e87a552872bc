# SPDX-License-Identifier: Apache-2.0
"""`pelton demo`: serve the bundled model with prompts computed apart, ask it something, measure it,
say where the report is."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pelton.cli.options import user_errors
from pelton.core.config import Device, Role
from pelton.core.errors import ConfigError, PeltonError

if TYPE_CHECKING:
    from rich.console import Console

_HELP = "\n\n".join(
    (
        "Serve the bundled model, ask it a question, and measure it with LoadGen.",
        "On the CPU one worker computes prompts and another decodes; elsewhere, as with --device "
        "cuda, one worker does both.",
        "Takes about three minutes on two fast CPU cores; slow ones take up to ten, and their "
        "limits are wider. Needs no network. The exit code is that of pelton bench: 0 for a "
        "VALID run.",
        "Examples:",
        "  pelton demo --out report",
        "  pelton demo --device cuda",
    )
)
_QUESTION = "What is a lighthouse for? Answer in two sentences."
_MAX_ANSWER_TOKENS = 96
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_APART = ("--prefill", "1", "--decode", "1", "--min-remote-prefill", "16")
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
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.CPU,
) -> None:
    from rich.console import Console

    console = Console()
    _end_on_signals()
    with user_errors():
        try:
            exit_code = _run(model, device, out, console)
        except KeyboardInterrupt:
            exit_code = 130
        except ConfigError:
            raise
        except PeltonError as error:
            typer.echo(f"error: {error.message}", err=True)
            exit_code = 1
    raise typer.Exit(exit_code)


def _run(model: str, device: Device, out: str, console: "Console") -> int:
    import asyncio

    from rich.console import Console

    from pelton.bench.config import BenchConfig, ScenarioName
    from pelton.cli.bench import import_harness, print_outcome
    from pelton.core.config import CacheConfig, EngineConfig, ModelConfig

    run_bench = import_harness()
    from pelton.bench.demo_load import DATA_SET, choose_load
    from pelton.bench.harness import EXIT_INVALID, make_folder

    make_folder(Path(out))
    with _serve(model, device, console) as url:
        console.print(f"\nYou: {_QUESTION}")
        answer, route = _ask(url, model)
        console.print(
            f"{model}: {answer}\nx-pelton-route: {route}\n", highlight=False, markup=False
        )
        with console.status("Finding a load that this machine holds"):
            load = asyncio.run(choose_load(url, model))
        widened = "" if load.widening == 1 else f", {load.widening} times wider for this machine"
        console.print(
            f"Offering {load.qps:.1f} requests/s for about {load.duration_s:.0f} s: "
            f"{load.num_requests} requests of the bundled prompts, up to {load.output_len} tokens "
            f"each. Limits: {load.ttft_ms:,.0f} ms to the first token, {load.tpot_ms:,.0f} ms to "
            f"each other{widened}.",
            highlight=False,
        )
        bench = BenchConfig(
            scenario=ScenarioName.SERVER,
            url=url,
            out=out,
            qps=load.qps,
            ttft_ms=load.ttft_ms,
            tpot_ms=load.tpot_ms,
            requests=load.num_requests,
            dataset=DATA_SET,
            output_len=load.output_len,
        )
        engine = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(prefix_cache=False))
        outcome = run_bench(bench, engine, Console(stderr=True))
        _end_on_signals()  # the harness had handlers of its own
        for line in _describe_workers(url):
            console.print(line, highlight=False)
    print_outcome(outcome, console)
    if outcome.exit_code == EXIT_INVALID:
        console.print(
            "All parts of the demo ran; its limits were missed. If this machine was busy with "
            "something else, run it again."
        )
    return outcome.exit_code


def _end_on_signals() -> None:
    """So that the server is stopped, however the demo is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _serve(model: str, device: Device, console: "Console") -> Iterator[str]:
    """`pelton serve` on a free port for as long as the context lasts; yields its URL."""
    options = ["--device", device.value, *(_APART if device is Device.CPU else ())]
    shown = shlex.join(["pelton", "serve", model, *options])
    command = [sys.executable, "-P", "-m", "pelton.cli.main", "serve", model, *options]
    server = subprocess.Popen(
        [*command, "--port", "0", "--log-level", "warning"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
    )  # fmt: skip
    try:
        with console.status(shown):
            url = _wait_ready(server)
        console.print(f"{shown}\nis ready at {url}; watch it at {url}/dashboard", highlight=False)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()


def _wait_ready(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    for line in server.stdout:
        match = _READY_LINE.search(line)
        if match:
            return match["url"]
    try:
        exit_code = server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError("The server closed its output and did not end; try again.") from error
    if exit_code == 2:
        raise ConfigError("The server refused to start; its own message is above.")
    raise DemoError("The server ended before it was ready; its own message is above.")


def _ask(url: str, model: str) -> tuple[str, str]:
    """The answer, and which workers it is from."""
    import json

    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_completion_tokens": _MAX_ANSWER_TOKENS,
        "temperature": 0,
    }
    reply, headers = _call(f"{url}/v1/chat/completions", json.dumps(body).encode())
    return str(reply["choices"][0]["message"]["content"]).strip(), headers["x-pelton-route"]


def _describe_workers(url: str) -> Iterator[str]:
    """What each worker that is up has done, where they have roles."""
    data, _ = _call(f"{url}/dashboard/data")
    for worker in data["workers"]:
        name, stats = f"Worker {worker['worker']} ({worker['role']})", worker["stats"]
        if stats is not None and worker["role"] == Role.PREFILL:
            yield f"{name} computed {stats['prefills_total']} prompts for the other."
        elif stats is not None and worker["role"] == Role.DECODE:
            yield (
                f"{name} took the KV of {stats['pulls_total']} prompts,"
                f" {stats['pulled_bytes_total'] / 1e9:.2f} GB, and decoded"
                f" {stats['generated_tokens_total']} tokens;"
                f" {stats['pull_fallbacks_total']} prompts it had to compute itself."
            )


def _call(url: str, body: bytes | None = None) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The JSON of a reply, and its headers."""
    import json
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
            return json.load(response), response.headers
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise DemoError(f"The server did not answer at {url}: {error}.") from error
