# SPDX-License-Identifier: Apache-2.0
"""An engine in a worker of its own, started for the run: measures the engine without HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from pelton.bench.load_messages import WorkerTarget
from pelton.bench.record import TargetInfo
from pelton.bench.target import check_lengths
from pelton.bench.traffic import Sample
from pelton.core.config import EngineConfig
from pelton.core.stats import EngineStats
from pelton.serving.launcher import WorkerProcess
from pelton.serving.messages import WorkerInfo
from pelton.serving.worker_client import WorkerClient

_START_TIMEOUT_S = 600.0


class EngineTarget:
    def __init__(self, worker: WorkerProcess, client: WorkerClient) -> None:
        self._client = client
        self.address = WorkerTarget(address=worker.address)

    @property
    def info(self) -> TargetInfo:
        info = self._client.info
        return TargetInfo(
            kind="engine", model=_label(info), url=None, max_model_len=info.max_model_len,
            config=info.config, config_hash=info.config_hash,
        )  # fmt: skip

    @property
    def vocab_size(self) -> int | None:
        return self._client.info.vocab_size

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        from pelton.bench.tokenise import tokenise_samples

        if any(sample.input_tokens is None for sample in samples):
            samples = tokenise_samples(samples, self._client.info.model)
        check_lengths(samples, self._client.info.max_model_len)
        return list(samples)

    async def read_stats(self) -> EngineStats | None:
        return self._client.stats


@asynccontextmanager
async def start_engine(
    config: EngineConfig, on_progress: Callable[[str], None]
) -> AsyncGenerator[EngineTarget, None]:
    """A worker of its own for the run; `on_progress` is called on another thread."""
    with WorkerProcess(config, on_progress=on_progress) as worker:
        # Leaving the context stops the worker, which ends the wait on the other thread as well.
        await asyncio.to_thread(worker.wait_ready, _START_TIMEOUT_S)
        client = await WorkerClient.connect(worker.address)
        try:
            yield EngineTarget(worker, client)
        finally:
            client.close()


def _label(info: WorkerInfo) -> str:
    """The name in records: random weights are always called so."""
    random_weights = info.config.get("model", {}).get("random_weights", "")
    return f"{random_weights} (random weights)" if random_weights else info.model
