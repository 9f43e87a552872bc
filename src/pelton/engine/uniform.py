# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a pure function of a request's seed and a token's position.

No generator is shared or advanced, so a seeded request draws the same numbers alone, in any batch,
and again after preemption. The mixing function is SplitMix64's (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014).
"""

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each pair, a multiple of 2**-24, so exact in float32."""
    state = _mix(seeds) + positions.astype(np.uint64) * _GAMMA
    bits = _mix(state) >> np.uint64(40)
    return (bits.astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
