# SPDX-License-Identifier: Apache-2.0
"""Runs one request against the system under test and keeps its record, whatever happens to it."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing

from pelton.bench.measurements import BUCKET_NS, RequestRecord
from pelton.bench.traffic import Sample
from pelton.core.errors import PeltonError
from pelton.core.ports import SystemUnderTest, TokenArrival

OnTokens = Callable[[Sequence[int]], None]
MIN_TOKENS = 2
"""LoadGen cannot take fewer: one token has no time per output token."""


def _ignore(token_ids: Sequence[int]) -> None:
    pass


class RequestRunner:
    """Counts what it runs. Used by one event loop."""

    def __init__(
        self, sut: SystemUnderTest[Sample], samples: Sequence[Sample], *, timeout_s: float
    ) -> None:
        self._sut = sut
        self._samples = samples
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:12]
        self.num_completed = 0
        self.num_failed = 0
        self.num_failed_in_a_row = 0
        self.num_output_tokens = 0
        self.newest_error = ""
        self.tokens_by_bucket: dict[int, int] = {}

    def reset_counts(self) -> None:
        """Forgets warm-up and calibration."""
        self.num_completed = self.num_failed = self.num_failed_in_a_row = 0
        self.num_output_tokens = 0
        self.tokens_by_bucket = {}

    def make_record(self, sample_index: int, issued_ns: int) -> RequestRecord:
        return RequestRecord(
            request_id=f"bench-{self._name}-{next(self._numbers)}",
            sample_index=sample_index,
            scheduled_ns=issued_ns,
            issued_ns=issued_ns,
        )

    async def run(
        self,
        record: RequestRecord,
        *,
        on_first: OnTokens = _ignore,
        on_finish: OnTokens = _ignore,
    ) -> None:
        """Fills `record`. Never raises for what the system under test does: a request that fails
        has `record.error`. `on_first` is called with the first tokens, `on_finish` with all of
        them the moment the last one arrived; neither after a failure."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._consume(record, on_first, on_finish)
        except TimeoutError:
            record.error = f"No complete answer within {self._timeout_s:g} s."
        except asyncio.CancelledError:
            record.error = "Cancelled: the run ended early."
            raise
        except PeltonError as error:
            record.error = error.message
        except Exception as error:
            # Whatever foreign code raises is that request's failure, and must not end the run.
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self._count(record)

    async def _consume(
        self, record: RequestRecord, on_first: OnTokens, on_finish: OnTokens
    ) -> None:
        tokens: list[int] = []
        sample = self._samples[record.sample_index]
        async with aclosing(self._sut.generate(sample, record.request_id)) as stream:
            async for arrival in stream:
                self._note_counts(record, arrival)
                if record.finish_reason is not None:
                    continue
                if arrival.token_ids:
                    if not tokens:
                        record.first_token_ns = arrival.time_ns
                        on_first(arrival.token_ids)
                    tokens += arrival.token_ids
                    record.last_token_ns = arrival.time_ns
                    record.num_output_tokens = len(tokens)
                    self._note_tokens(arrival)
                if arrival.finish_reason is not None:
                    if len(tokens) < MIN_TOKENS:
                        raise PeltonError(
                            f"{len(tokens)} output tokens came back, fewer than {MIN_TOKENS}."
                        )
                    record.finish_reason = arrival.finish_reason.value
                    on_finish(tokens)

    def _note_counts(self, record: RequestRecord, arrival: TokenArrival) -> None:
        if arrival.num_prompt_tokens is not None:
            record.num_prompt_tokens = arrival.num_prompt_tokens
        if arrival.num_cached_tokens is not None:
            record.num_cached_tokens = arrival.num_cached_tokens

    def _note_tokens(self, arrival: TokenArrival) -> None:
        num_tokens = len(arrival.token_ids)
        bucket = arrival.time_ns // BUCKET_NS
        self.num_output_tokens += num_tokens
        self.tokens_by_bucket[bucket] = self.tokens_by_bucket.get(bucket, 0) + num_tokens

    def _count(self, record: RequestRecord) -> None:
        self.num_completed += 1
        if record.is_ok:
            self.num_failed_in_a_row = 0
        else:
            self.num_failed += 1
            self.num_failed_in_a_row += 1
            self.newest_error = record.error or "no answer"
