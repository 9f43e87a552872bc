# SPDX-License-Identifier: Apache-2.0
"""An engine worker as the system under test: the engine without HTTP, template or detokeniser."""

import time
from collections.abc import AsyncGenerator

from pelton.bench.load_messages import WorkerTarget
from pelton.bench.traffic import Sample
from pelton.core.ports import TokenArrival
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.serving.worker_client import WorkerClient

_MIN_TOKENS = 2


class WorkerSut:
    """Implements `core.ports.SystemUnderTest` for `Sample`s that hold token ids."""

    def __init__(self, client: WorkerClient, *, may_reuse_prefixes: bool) -> None:
        self._client = client
        self._may_reuse_prefixes = may_reuse_prefixes

    @classmethod
    async def connect(cls, target: WorkerTarget, *, may_reuse_prefixes: bool) -> "WorkerSut":
        client = await WorkerClient.connect(target.address)
        return cls(client, may_reuse_prefixes=may_reuse_prefixes)

    async def generate(self, sample: Sample, request_id: str) -> AsyncGenerator[TokenArrival, None]:
        assert sample.input_tokens is not None, "a worker takes token ids"
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=sample.input_tokens,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=sample.max_tokens,
                min_tokens=_MIN_TOKENS,
                ignore_eos=sample.ignore_eos,
            ),
            seed=0,
            cache_salt="" if self._may_reuse_prefixes else request_id,
        )
        stream = self._client.submit(request)
        try:
            async for outputs in stream:
                time_ns = time.time_ns()
                for output in outputs:
                    yield TokenArrival(
                        time_ns,
                        output.token_ids,
                        output.finish_reason,
                        num_prompt_tokens=len(sample.input_tokens),
                        num_cached_tokens=output.num_cached_tokens,
                    )
        finally:
            stream.cancel()

    async def close(self) -> None:
        self._client.close()
