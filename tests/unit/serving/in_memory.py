# SPDX-License-Identifier: Apache-2.0
"""A worker and an HTTP client without processes or sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pelton.core.config import EngineConfig, ModelConfig, ServerConfig
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.http.app import make_app
from pelton.serving.http.frontend import Frontend
from pelton.serving.stand_in import StandInEngine, make_stand_in
from pelton.serving.tokenizer import Tokenizer
from pelton.serving.worker import Worker, make_worker_info
from pelton.serving.worker_client import WorkerClient


class InMemoryTransport:
    """Hands payloads to a `Worker` in the same process; somebody steps the worker."""

    def __init__(self, engine: StandInEngine) -> None:
        self.worker = Worker(engine, make_worker_info(engine), self._to_client)
        self.is_connected = True
        self.lose: Callable[[], None] = lambda: None

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self.lose = on_message, on_lost

    def send(self, payload: bytes) -> None:
        self.worker.receive(b"client", payload)

    def close(self) -> None:
        self.is_connected = False

    def _to_client(self, client: bytes, payload: bytes) -> bool:
        if self.is_connected:
            self._on_message(payload)
        return self.is_connected


def make_engine(options: str = "") -> StandInEngine:
    return make_stand_in(EngineConfig(model=ModelConfig(model=f"stand-in:none{options}")))


@dataclass(slots=True)
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The streamed events before the last, which must be [DONE]."""
        frames = self.body.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""], frames[-2:]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


class Server:
    """The application on an in-memory worker that steps while it has work."""

    def __init__(self, frontend: Frontend, engine: StandInEngine) -> None:
        self.frontend = frontend
        self.engine = engine
        self.transport = InMemoryTransport(engine)
        self.app = make_app(frontend)
        self.num_steps_left = -1
        """Steps until the worker stops stepping; negative: it never does."""

    async def connect(self) -> None:
        client = await WorkerClient.over(self.transport)
        self.client = client
        self.frontend.workers.roster.use(0, client, 1)

    async def step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.num_steps_left and self.transport.worker.has_work:
                self.transport.worker.step()
                self.num_steps_left -= 1

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.call("GET", path, b"", **options)

    async def call(
        self,
        method: str,
        path: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        leave_after_chunks: int | None = None,
        leave: asyncio.Event | None = None,
    ) -> Reply:
        """`leave_after_chunks` and `leave`: the client goes away then."""
        reply, left = Reply(), leave or asyncio.Event()
        raw = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        pending = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            elif message.get("body"):
                reply.chunks.append(message["body"])
                if leave_after_chunks is not None and len(reply.chunks) >= leave_after_chunks:
                    left.set()
            await asyncio.sleep(0)

        await asyncio.wait_for(self.app(scope, receive, send), 30)
        return reply


_TEXT_SIDE: list[tuple[Tokenizer, ChatTemplate]] = []


def load_text_side() -> tuple[Tokenizer, ChatTemplate]:
    """The bundled model's tokenizer and template, read once."""
    if not _TEXT_SIDE:
        checkpoint = open_checkpoint("smollm2")
        tokenizer = Tokenizer.load(checkpoint)
        template = ChatTemplate(checkpoint.chat_template, tokenizer.special_tokens)
        _TEXT_SIDE.append((tokenizer, template))
    return _TEXT_SIDE[0]


@asynccontextmanager
async def running_server(
    options: str = "", engine: StandInEngine | None = None, **settings: Any
) -> AsyncIterator[Server]:
    config = ServerConfig(**{"served_model_name": "stand-in", **settings})
    frontend = Frontend(config, "smollm2", *load_text_side())
    server = Server(frontend, engine or make_engine(options))
    await server.connect()
    stepper = asyncio.create_task(server.step_for_ever())
    try:
        yield server
    finally:
        stepper.cancel()
        await frontend.template_process.close()
        server.client.close()
