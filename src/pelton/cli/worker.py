# SPDX-License-Identifier: Apache-2.0
"""`pelton worker`: this machine runs workers of a server on another."""

import signal
from pathlib import Path

import typer

from pelton.cli.options import Settings, with_settings
from pelton.core.config import HostConfig
from pelton.core.errors import ConfigError

_EPILOG = """Examples:

  pelton worker --new-key pelton.key

  pelton worker --join tcp://10.0.0.1:7000 --worker-key pelton.key

  pelton worker --join tcp://10.0.0.1:7000 --worker-key pelton.key --role decode --num-workers 8

The server is started with the same key, its model at the same path on every machine:

  pelton serve ./Llama-3.1-8B --prefill 1 --decode 1 --listen-workers tcp://10.0.0.1:7000
  --worker-key pelton.key

It says what to run, ends what it no longer needs, and replaces what dies. A machine that loses the
server ends its workers and joins again. Exit code 2: the server turned this machine away."""


def register(app: typer.Typer) -> None:
    app.command(epilog=_EPILOG)(with_settings(HostConfig)(worker))


def worker(
    settings: Settings,
    new_key: str = typer.Option("", "--new-key", help="Write a new key to this file, and exit."),
) -> None:
    """Run workers of a server on another machine."""
    from pelton.serving.hosts.agent import HostAgent
    from pelton.serving.process import raise_file_limit, set_up_logging
    from pelton.serving.wire_keys import write_new_keys

    if new_key:
        write_new_keys(Path(new_key))
        typer.echo(f"Wrote {new_key}: copy it to every machine, and let nobody else read it.")
        return
    config = settings[HostConfig]
    if not config.join:
        raise ConfigError("Name the server to work for with --join tcp://HOST:PORT.", param="join")
    set_up_logging(config.log_level)
    raise_file_limit()
    agent = HostAgent(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop.set())
    agent.run()
