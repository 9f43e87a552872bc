# SPDX-License-Identifier: Apache-2.0
"""Who goes on: the partitions of a program, one at a time, and the work under way beside them.

Each partition is a thread, but only that with the turn runs. It gives the turn away where it meets
the others (at barriers, shared memory, copies and products), and the seed chooses what happens
next: a partition that need not wait goes on, or a piece of work is done.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import FrameType
from typing import Any

_THREAD = threading.local()
_FOLDER = str(Path(__file__).parent)
_MOOD_SWINGS = 1 / 32
"""How often a partition becomes more eager, or less, while it runs."""


class Fault(Exception):
    """What a card does not define, or does without a word."""


class Hang(Exception):
    """Nobody can go on."""


class _Abandoned(Exception):
    """Ends the other partitions of a program that failed."""


def current() -> "Partition":
    """The partition whose code runs."""
    partition: Partition = _THREAD.partition
    return partition


def kernel_frame(frame: FrameType | None = None) -> FrameType:
    """The innermost one outside the emulator."""
    frame = frame or sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FOLDER) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


class Work:
    """A copy, product or arrival that happens by itself, some time after all of `after`."""

    def __init__(self, name: str, act: Callable[[], None], after: tuple["Work", ...] = ()) -> None:
        self.name = f"{name} that {_place(kernel_frame())} started"
        self.is_done = False
        self._act = act
        self._after = after
        self.eagerness = current().program.draw_eagerness()
        current().program.under_way.append(self)

    def can_happen(self) -> bool:
        return all(work.is_done for work in self._after)

    def happen(self) -> None:
        try:
            self._act()
        except Fault as fault:
            fault.add_note(f"in the {self.name}")
            raise
        self.is_done = True


class Partition:
    def __init__(
        self, program: "Program", index: int, function: Callable[[], Any], num_warps: int
    ) -> None:
        self.program = program
        self.index = index
        self.num_warps = num_warps
        self.products: list[Work] = []
        """Started and not waited for, in order."""
        self.copies: list[Work] = []
        """Its threads' own, started since the last group was closed."""
        self.copy_groups: list[list[Work]] = []
        """The closed ones."""
        self.unfenced: list[Any] = []
        """Views of shared memory that it has written since its last fence."""
        self.is_done = False
        self.eagerness = program.draw_eagerness()
        self.turn: SimpleQueue[None] = SimpleQueue()
        self.can_go_on: Callable[[], bool] = lambda: True
        self.describe: Callable[[], str] = lambda: "its turn"
        self.thread = threading.Thread(target=program.live, args=(self, function), daemon=True)
        self.thread.start()

    def wait(self, condition: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Gives the turn away until the condition holds and the seed chooses this partition."""
        self.can_go_on, self.describe = condition, describe
        self.program.pass_turn()
        self.take_turn()

    def take_turn(self) -> None:
        self.turn.get()
        if self.program.failure is not None:
            raise _Abandoned

    def pause(self) -> None:
        self.wait(lambda: True, lambda: "its turn")

    def where(self) -> str:
        assert self.thread.ident is not None
        frame = sys._current_frames()[self.thread.ident]
        return _place(kernel_frame(frame))


class Program:
    """One of a grid's."""

    def __init__(
        self, random: Random, place: tuple[int, ...], grid: tuple[int, ...], num_warps: int
    ) -> None:
        self.place = place
        self.grid = grid
        self.under_way: list[Work] = []
        self._random = random
        self._num_warps = num_warps
        self._partitions: list[Partition] = []
        self.failure: BaseException | None = None
        self._ended = threading.Event()

    def run(self, function: Callable[[], Any]) -> None:
        """Until its end; raises what a partition raised."""
        self._partitions.append(Partition(self, 0, function, self._num_warps))
        self._partitions[0].turn.put(None)
        self._ended.wait()
        for partition in self._partitions:
            partition.thread.join()
        if self.failure is not None:
            raise self.failure

    def run_partitions(self, functions: list[Callable[[], Any]], num_warps: list[int]) -> None:
        """Until all have ended. The first has as many warps as the kernel."""
        counts = [self._num_warps, *num_warps]
        others = [
            Partition(self, index, function, count)
            for index, (function, count) in enumerate(zip(functions, counts, strict=True), start=1)
        ]
        self._partitions += others
        current().wait(lambda: all(other.is_done for other in others), lambda: "its partitions")

    def draw_eagerness(self) -> float:
        """From one that is almost always first to one that is almost always last."""
        return 10.0 ** -self._random.uniform(0, 3)

    def live(self, partition: Partition, function: Callable[[], Any]) -> None:
        """A partition's thread."""
        _THREAD.partition = partition
        try:
            partition.take_turn()
            function()
            if partition.products:
                raise Fault(f"nobody waited for the {partition.products[0].name}")
            partition.is_done = True
            self.pass_turn()
        except _Abandoned:
            return
        except BaseException as error:
            self.failure = error
            self._end()

    def pass_turn(self) -> None:
        """To whom the seed chooses, behind all work that it chooses before."""
        while True:
            partitions = [x for x in self._partitions if not x.is_done]
            if not partitions:
                if self.under_way:
                    raise Fault(f"the program ended before the {self.under_way[0].name}")
                self._end()
                return
            if self._random.random() < _MOOD_SWINGS:
                self._random.choice(partitions).eagerness = self.draw_eagerness()
            able = [x for x in partitions if x.can_go_on()]
            actors = able + [work for work in self.under_way if work.can_happen()]
            if not actors:
                raise Hang(self._describe_waits(partitions))
            [actor] = self._random.choices(actors, [actor.eagerness for actor in actors])
            if isinstance(actor, Partition):
                actor.turn.put(None)
                return
            self.under_way.remove(actor)
            actor.happen()

    def _describe_waits(self, partitions: list[Partition]) -> str:
        lines = [f"program {self.place}: nobody can go on"]
        lines += [f"partition {x.index}, {x.where()}, waits for {x.describe()}" for x in partitions]
        return "\n".join(lines)

    def _end(self) -> None:
        for partition in self._partitions:
            partition.turn.put(None)
        self._ended.set()
