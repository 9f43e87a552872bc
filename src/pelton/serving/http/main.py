# SPDX-License-Identifier: Apache-2.0
"""The frontend process: HTTP on a socket it was given, the workers it was told of, its orders.

    python -m pelton.serving.http.main      first line of stdin: `messages.StartFrontend`

Later lines name workers to use or to leave, or order a drain. End of file means that the supervisor
is gone, and so is the frontend at once. Nothing here imports torch.
"""

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec
import uvicorn
import uvloop

import pelton
from pelton.core.env import tokenise_in_the_calling_thread
from pelton.core.errors import ConfigError
from pelton.models.checkpoint import open_checkpoint
from pelton.serving import messages
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.http.app import make_app
from pelton.serving.http.control import Control, Report
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.peers import answer_peer
from pelton.serving.http.protocol import LimitedProtocol
from pelton.serving.local_calls import answer_calls, frontend_path
from pelton.serving.process import (
    read_first_line,
    set_up_logging,
    start_beating,
    take_over_stdout,
)
from pelton.serving.stand_in import STAND_IN_SCHEME, parse_stand_in
from pelton.serving.tokenizer import Tokenizer

LISTEN_BACKLOG = 4096
_KEEP_ALIVE_S = 75

_log = logging.getLogger("pelton.serving")


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


async def _serve(frontend: Frontend, listen_fd: int, report: Report) -> NoReturn:
    if frontend.config.frontends > 1:
        path = frontend_path(frontend.directory, frontend.number)
        _peers = await answer_calls(path, partial(answer_peer, frontend))
    config = uvicorn.Config(
        make_app(frontend),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=LISTEN_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, lambda: report(messages.Listening()))
    control = Control(frontend, report)
    loop = asyncio.get_running_loop()

    def take_order(order: messages.ToFrontend) -> None:
        loop.call_soon_threadsafe(control.orders.put_nowait, order)

    threading.Thread(
        target=_read_orders, args=(take_order, frontend.directory), daemon=True
    ).start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=listen_fd)]))
    orders = asyncio.create_task(control.run())
    await asyncio.wait({serving, orders}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    if frontend.tracing is not None:
        await frontend.tracing.close()
    # At once: threads that still tokenise, and the one that reads stdin, would be waited for.
    os._exit(0)


def _read_orders(take_order: Callable[[messages.ToFrontend], None], directory: str) -> None:
    """`directory`: gone with the supervisor, however that ended."""
    with os.fdopen(0, "rb", closefd=False) as lines:
        for line in lines:
            try:
                order = messages.decode_to_frontend(line)
            except msgspec.MsgspecError as error:  # Pelton was replaced while the server runs
                _log.error("event=order_not_understood error=%r", str(error))
                os._exit(2)
            take_order(order)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def make_frontend(start: messages.StartFrontend) -> Frontend:
    """Raises `CheckpointError` for a tokenizer or template that cannot be used."""
    model = start.model
    if model.startswith(STAND_IN_SCHEME):
        model = parse_stand_in(model).model
    checkpoint = open_checkpoint(model)
    tokenizer = Tokenizer.load(checkpoint, start.vocab_size)
    template = ChatTemplate(checkpoint.chat_template, tokenizer.special_tokens)
    return Frontend(
        start.config,
        start.model,
        tokenizer,
        template,
        number=start.number,
        directory=start.directory,
    )


def read_start() -> messages.StartFrontend:
    """The order that the supervisor sends first."""
    try:
        start = messages.decode_to_frontend(read_first_line())
    except msgspec.MsgspecError as error:
        sys.exit(
            f"error: This frontend runs Pelton {pelton.__version__}, and its order is of another"
            f" version ({error}): Pelton was replaced while the server runs; restart the server."
        )
    assert isinstance(start, messages.StartFrontend), start
    return start


def main() -> NoReturn:
    report = take_over_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = read_start()
    set_up_logging(start.config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tokenise_in_the_calling_thread()
    try:
        frontend = make_frontend(start)
    except ConfigError as error:
        report(messages.StartFailed(messages.ErrorInfo.of(error)))
        sys.exit(2)
    start_beating(report, start.config.worker_heartbeat_s)
    uvloop.run(_serve(frontend, start.listen_fd, report))


if __name__ == "__main__":
    main()
