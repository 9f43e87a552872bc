# SPDX-License-Identifier: Apache-2.0
"""Barriers in shared memory (PTX's mbarrier)."""

from gluon_emulator.schedule import Fault, current


class Barrier:
    """A phase ends when all its arrivals and all bytes it awaits are there; the next begins."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = 0
        self._phase = 0
        self._missing_arrivals = 0
        self._missing_bytes = 0

    def initialise(self, count: int) -> None:
        self._count = self._missing_arrivals = count

    def arrive(self, count: int = 1, num_bytes: int = 0) -> None:
        """`num_bytes` more are awaited in this phase."""
        self._check_initialised()
        if count > self._missing_arrivals:
            raise Fault(f"{count} arrivals too many: {self}")
        self._missing_arrivals -= count
        self._missing_bytes += num_bytes
        self._end_phase()

    def land(self, num_bytes: int) -> None:
        self._check_initialised()
        self._missing_bytes -= num_bytes
        self._end_phase()

    def wait(self, parity: int) -> None:
        """For the end of the phase of this parity: the current one's, or else the last one's."""
        self._check_initialised()
        current().wait(
            lambda: self._phase % 2 != parity, lambda: f"the phase of parity {parity}: {self}"
        )

    def _end_phase(self) -> None:
        # Before the arrival that announces them, bytes may be ahead.
        if self._missing_bytes < 0 and self._missing_arrivals == 0:
            raise Fault(f"bytes too many: {self}")
        if self._missing_arrivals == self._missing_bytes == 0:
            self._phase += 1
            self._missing_arrivals = self._count

    def _check_initialised(self) -> None:
        if not self._count:
            raise Fault(f"{self.name} is used before it is initialised")

    def __str__(self) -> str:
        return (
            f"{self.name} is in phase {self._phase}, which misses {self._missing_arrivals} of "
            f"{self._count} arrivals and {self._missing_bytes} bytes"
        )


class BarrierArray:
    def __init__(self, name: str, count: int) -> None:
        self._barriers = [Barrier(f"{name}[{index}]") for index in range(count)]

    def index(self, index: object) -> Barrier:
        place = index.__index__()  # type: ignore[attr-defined]
        if not 0 <= place < len(self._barriers):
            raise Fault(f"there are {len(self._barriers)} barriers, and none of number {place}")
        return self._barriers[place]
