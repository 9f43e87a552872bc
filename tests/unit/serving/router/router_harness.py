# SPDX-License-Identifier: Apache-2.0
"""A router over workers that exist only as reports, on a clock that the test moves."""

from collections.abc import Iterable, Sequence
from typing import Any

from pelton.core.block_hash import BlockHash, hash_prompt, make_request_salt
from pelton.core.clock import ManualClock
from pelton.serving.router.events import CacheEvent, EventKind
from pelton.serving.router.router import Router
from pelton.serving.router.types import RouterConfig, RouteRequest, WorkerView

BLOCK_SIZE = 16


def make_view(worker_id: str, generation: int = 0, **fields: Any) -> WorkerView:
    defaults: dict[str, Any] = {
        "num_slots": 64,
        "num_blocks": 10_000,
        "block_size": BLOCK_SIZE,
        "publishes_events": True,
    }
    return WorkerView(id=worker_id, generation=generation, **(defaults | fields))


def make_router(worker_ids: Iterable[str], **config: Any) -> tuple[Router, ManualClock]:
    clock = ManualClock(1000.0)
    router = Router(RouterConfig(**config), clock)
    router.update([make_view(worker_id, reported_at_s=1000.0) for worker_id in worker_ids])
    return router, clock


def make_request(
    request_id: str, token_ids: Sequence[int], salt: str = "", **fields: Any
) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        num_prompt_tokens=len(token_ids),
        block_hashes=make_hashes(token_ids, salt),
        **fields,
    )


def make_hashes(token_ids: Sequence[int], salt: str = "") -> list[BlockHash]:
    return hash_prompt(token_ids, BLOCK_SIZE, make_request_salt("model", salt))


def distinct_prompt(number: int, num_tokens: int = 256) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [number, *range(num_tokens - 1)]


def stored(sequence: int, hashes: Iterable[BlockHash]) -> CacheEvent:
    return CacheEvent(sequence, EventKind.STORED, tuple(hashes))


def removed(sequence: int, hashes: Iterable[BlockHash]) -> CacheEvent:
    return CacheEvent(sequence, EventKind.REMOVED, tuple(hashes))
