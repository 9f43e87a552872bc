# SPDX-License-Identifier: Apache-2.0
"""`pelton workers`: lists, adds, drains and replaces the workers of a server that runs."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pelton.cli.options import user_errors
from pelton.core.errors import ConfigError, PeltonError

_HELP = """List, add, drain and replace the workers of a running server.

Examples:

  pelton workers list

  pelton workers add --count 2

  pelton workers add --role decode --url http://10.0.0.5:8000 --api-key secret

  pelton workers drain 1 --timeout-s 300

  pelton workers roll

A server without an API key takes these from its own machine only. Exit code 2: the server cannot
be reached, or refuses; exit code 1: it began and could not finish."""
_POLL_S = 0.2
_CALL_TIMEOUT_S = 30.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_URL = typer.Option("http://127.0.0.1:8000", "--url", help="Where the server listens.")
_KEY = typer.Option("", "--api-key", help="Its API key, if it has one.")
_TIMEOUT = typer.Option(
    60.0, "--timeout-s", help="How long requests may take to end before they go on elsewhere."
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(help=_HELP, no_args_is_help=True)
    for name, command in (("list", list_), ("add", add), ("drain", drain), ("roll", roll)):
        commands.command(name, epilog=_EPILOGS[name])(command)
    app.add_typer(commands, name="workers")


_EPILOGS = {
    "list": "Example:\n\n  pelton workers list --url http://127.0.0.1:8000",
    "add": "Examples:\n\n  pelton workers add\n\n  pelton workers add --role prefill --count 2",
    "drain": "Example:\n\n  pelton workers drain 1 --timeout-s 300",
    "roll": "Example:\n\n  pelton workers roll --timeout-s 300",
}


def list_(url: str = _URL, api_key: str = _KEY) -> None:
    """Show every worker: its role, its phase, its requests."""
    with user_errors():
        _print_table(_call(url, api_key, "GET", "/admin/workers"))


def add(
    role: str = typer.Option("mixed", "--role", help="mixed, or prefill or decode."),
    count: int = typer.Option(1, "--count", help="How many."),
    url: str = _URL,
    api_key: str = _KEY,
) -> None:
    """Start more workers, and wait until they are sent requests."""
    with user_errors():
        body = {"role": role, "count": count}
        _follow(url, api_key, _call(url, api_key, "POST", "/admin/workers", body))


def drain(
    worker: int = typer.Argument(help="The number of the worker."),
    timeout_s: float = _TIMEOUT,
    url: str = _URL,
    api_key: str = _KEY,
) -> None:
    """Let a worker finish what it has, and end it."""
    with user_errors():
        path = f"/admin/workers/{worker}/drain"
        _follow(url, api_key, _call(url, api_key, "POST", path, {"timeout_s": timeout_s}))


def roll(timeout_s: float = _TIMEOUT, url: str = _URL, api_key: str = _KEY) -> None:
    """Replace every worker, one after the other, without a failed request."""
    with user_errors():
        body = {"timeout_s": timeout_s}
        _follow(url, api_key, _call(url, api_key, "POST", "/admin/workers/roll", body))


def _follow(url: str, api_key: str, reply: dict[str, Any]) -> None:
    """Shows the progress of the change that began, then the table."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("")
        while not reply["operation"]["is_done"]:
            progress.update(task, description=_describe(reply))
            time.sleep(_POLL_S)
            reply = _patiently(lambda: _call(url, api_key, "GET", "/admin/workers"))
    _print_table(reply)
    error = reply["operation"]["error"]
    if error is not None:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1)


def _patiently(get: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Once more where the frontend that was asked has ended meanwhile."""
    try:
        return get()
    except PeltonError:
        time.sleep(1.0)
        return get()


def _describe(reply: dict[str, Any]) -> str:
    operation = reply["operation"]
    numbers, num_done = operation["workers"], operation["num_done"]
    now = numbers[min(num_done, len(numbers) - 1)]
    left = [row["num_running"] + row["num_waiting"] for row in reply["data"]
            if row["worker"] == now and row["phase"] == "draining"]  # fmt: skip
    words = {"add": "starting", "drain": "draining", "roll": "replacing"}[operation["kind"]]
    text = f"{words} worker {now} ({num_done} of {len(numbers)} done)"
    return f"{text}, {left[0]} requests left" if left else text


def _print_table(reply: dict[str, Any]) -> None:
    table = Table("worker", "role", "phase", "generation", "running", "waiting", "process")
    for row in reply["data"]:
        table.add_row(
            *(str(row[name]) for name in ("worker", "role", "phase", "generation")),
            *(str(row[name]) for name in ("num_running", "num_waiting", "process")),
        )
    Console().print(table)


def _call(url: str, api_key: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The decoded reply. Raises `ConfigError` with what the server says where it refuses."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)
        with _opener.open(request, timeout=_CALL_TIMEOUT_S) as reply:
            decoded = json.load(reply)
    except urllib.error.HTTPError as error:
        raise ConfigError(_read_error(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{url} cannot be asked: {reason}; see --url.") from error
    if not isinstance(decoded, dict) or "data" not in decoded:
        raise ConfigError(f"{url} is not a Pelton server: see --url.")
    return decoded


def _read_error(error: urllib.error.HTTPError) -> str:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The server answered {error.code} {error.reason}; see --url."
    return str(message)
