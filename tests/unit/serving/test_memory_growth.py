# SPDX-License-Identifier: Apache-2.0
"""Requests that end, however they end, leave no object behind in the frontend or the worker."""

import asyncio
import gc
import random

from in_memory import Server, running_server

from pelton.core.config import EngineConfig, ModelConfig
from pelton.serving.stand_in import make_scheduled_stand_in, parse_stand_in

MODEL = "stand-in:smollm2?scheduled=1&num_blocks=24&max_num_requests=8&max_model_len=256"
NUM_REQUESTS = 60


async def run_round(server: Server, seed: int) -> int:
    """Sends requests of every kind, some of which leave; the number of objects afterwards."""
    generator = random.Random(seed)

    async def send() -> None:
        is_left = generator.random() < 0.4
        body = {
            "prompt": [generator.randrange(1000, 40000) for _ in range(generator.randrange(1, 90))],
            "max_tokens": generator.randrange(1, 60),
            "n": generator.choice([1, 1, 3]),
            "logprobs": generator.choice([None, 2]),
            "stream": is_left or generator.random() < 0.5,
        }
        await server.post("/v1/completions", body, leave_after_chunks=1 if is_left else None)

    await asyncio.gather(*(send() for _ in range(NUM_REQUESTS)))
    while server.transport.worker.has_work:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()
    return len(gc.get_objects())


async def test_objects_do_not_grow_with_the_number_of_requests() -> None:
    engine = make_scheduled_stand_in(
        EngineConfig(model=ModelConfig(model=MODEL)), parse_stand_in(MODEL)
    )
    async with running_server(engine=engine) as server:  # type: ignore[arg-type]
        counts = [await run_round(server, seed) for seed in range(7)]
        assert server.frontend.metrics.num_aborted > 0
        assert engine.stats().preemptions_total > 0
        assert engine.stats().num_used_blocks == 0
    # The prefix cache and interned values fill in the first rounds.
    growth = counts[-1] - counts[3]
    assert growth < NUM_REQUESTS, counts
