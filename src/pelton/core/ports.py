# SPDX-License-Identifier: Apache-2.0
"""Ports: what a lower layer needs of a higher one, as protocols. Only `cli` wires them."""

from typing import Protocol

from pelton.core.step import StepPlan, StepResult


class PendingStep(Protocol):
    """A step that was launched and whose results may not be on the host yet."""

    def wait(self) -> StepResult:
        """Blocks until the results are on the host. Called once."""
        ...


class Executor(Protocol):
    """Runs planned steps in the order they are launched."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts `plan` and returns without waiting for a device. May be called again before the
        previous step was waited for: sampled tokens never visit the host before reuse."""
        ...
