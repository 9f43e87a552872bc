# SPDX-License-Identifier: Apache-2.0
"""Interactive: the server scenario with limits a person who reads along would set.

A tight time per output token keeps batches small, so queueing shows earlier: less of the
calibrated capacity is offered.
"""

from pelton.bench.scenarios.policy import Limits
from pelton.bench.scenarios.server import PoissonScenario

INTERACTIVE = PoissonScenario(default_limits=Limits(ttft_ms=500, tpot_ms=30), load_fraction=0.5)
