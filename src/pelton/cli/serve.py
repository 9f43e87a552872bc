# SPDX-License-Identifier: Apache-2.0
"""`pelton serve MODEL`: an OpenAI-compatible server on this machine."""

import dataclasses
import json
import shlex

import typer

from pelton.cli.options import Settings, with_settings
from pelton.core.config import EngineConfig, ServerConfig
from pelton.core.errors import ConfigError, PeltonError

_EPILOG = """Examples:

  pelton serve smollm2

  pelton serve model.gguf --port 9000 --max-model-len 4096

  pelton serve ./Llama-3.1-8B --api-key secret --max-queue 256

  pelton serve ./Llama-3.1-8B --speculative ngram:4 --kv-cache-dtype fp8

  pelton serve ./Hermes-3-Llama-3.1-8B --tool-parser hermes

  pelton serve ./DeepSeek-R1 --speculative mtp:3 --reasoning-parser deepseek

  pelton serve smollm2 --random-weights gpt-oss-20b --layers 2

  pelton serve ./Llama-3.1-8B --workers 4 --router least-loaded

  pelton serve ./Llama-3.1-8B --workers 8 --frontends 2

  pelton serve ./Llama-3.1-8B --prefill 1 --decode 1

  pelton serve ./Llama-3.1-8B --prefill 1 --decode 1 --listen-workers tcp://10.0.0.1:7000
  --worker-key pelton.key

  pelton serve ./Llama-3.1-8B --workers 4 --launcher ray --ray-address 10.0.0.1:6379
  --worker-key pelton.key

With --api-key every route needs the key, except /health (the process answers), /ready (a request
would be served) and the page /dashboard, which asks for it: probes and browsers carry none.

With --workers each worker has a GPU of its own, or its share of the CPU's cores and memory; sizes
such as --kv-memory-bytes and --num-threads are for each. With --prefill and --decode prompts are
computed by some workers and their KV moves to others, which decode without being interrupted. With
--listen-workers the workers run on machines that join with 'pelton worker', with --launcher ray on
the nodes of a Ray cluster. 'pelton workers' adds, drains and replaces them while the server runs.

SIGTERM or Ctrl-C lets running requests finish within --drain-timeout-s and exits with 0; a second
one ends at once. Exit code 2: the model, the settings or the port cannot be used."""


def register(app: typer.Typer) -> None:
    app.command(epilog=_EPILOG)(with_settings(EngineConfig, ServerConfig)(serve))


def serve(settings: Settings) -> None:
    """Serve MODEL over HTTP: chat, completions, token ids, metrics."""
    import asyncio
    import time

    from pelton.serving.hosts.launcher import HostsLauncher
    from pelton.serving.hosts.ray_launcher import RayLauncher
    from pelton.serving.launcher import Launcher, LocalLauncher
    from pelton.serving.process import raise_file_limit, set_up_logging
    from pelton.serving.runtime_directory import RuntimeDirectory
    from pelton.serving.supervisor import Supervisor
    from pelton.serving.wire_keys import read_keys

    start_s = time.monotonic()
    engine, server = settings[EngineConfig], settings[ServerConfig]
    if not server.served_model_name:
        server = dataclasses.replace(server, served_model_name=engine.model.label)
    set_up_logging(server.log_level)
    raise_file_limit()

    def on_ready(url: str) -> None:
        took_s = time.monotonic() - start_s
        typer.echo(f"Ready at {url} after {took_s:.1f} s. Try: {_curl(url, server)}")

    def make_launcher(directory: RuntimeDirectory) -> Launcher:
        if server.launcher == "ray":
            return RayLauncher(engine, server)
        if not server.listen_workers:
            return LocalLauncher(directory)
        return HostsLauncher(server.listen_workers, read_keys(server.worker_key))

    supervisor = Supervisor(
        engine, server, on_ready, lambda phase: typer.echo(f"{phase} ...", err=True), make_launcher
    )
    try:
        asyncio.run(supervisor.run())
    except ConfigError:
        raise
    except PeltonError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from error


def _curl(url: str, server: ServerConfig) -> str:
    """A command that gets an answer from the server."""
    body = {
        "model": server.served_model_name,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
    key = " -H 'authorization: Bearer '$KEY" if server.api_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d {data}"
