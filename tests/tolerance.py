# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances, and the comparison that reads it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    rms: float
    """RMS of the error over RMS of the reference."""
    peak: float
    """Largest error over the largest magnitude of the reference."""


TOLERANCES = {
    torch.float32: Tolerance(rms=1e-5, peak=3e-5),
    torch.float16: Tolerance(rms=1e-3, peak=2e-3),
    torch.bfloat16: Tolerance(rms=5e-3, peak=1.2e-2),
}

FLOAT32_ABS = 1e-5
"""Two float32 computations of one value of moderate size, in different orders."""
FLOAT32_REL = 1e-5
LOGIT_ABS = 1e-4
"""Logits and log-probabilities of a whole float32 model beside another implementation's."""
FP8_PRODUCT_RMS = 0.04
"""A row of a product with e4m3 activations beside that with unrounded ones: a value of three
mantissa bits is off by 2^-4 of itself at most and 2.6 percent in the mean square."""
E4M3_STEP_REL, E4M3_STEP_ABS = 2**-3, 2**-9
"""From an e4m3 number to the next one: 3 bits of mantissa, the smallest exponent -6."""
FP8_KV_LOGPROB = 0.4
"""Mean distance of log-probabilities of a tiny random model (around -6.6) with keys and values in
e4m3 from those without: 0.12 was seen for Llama, with scales and without, 0.31 for GPT-OSS."""
FP8_KV_PERPLEXITY_REL = 0.02
"""Perplexity of SmolLM2 with keys and values in e4m3: 1.06 percent above that without over 9,474
tokens, 0.5 to 1.7 percent text by text."""
FP8_WEIGHTS_PERPLEXITY_REL = 0.03
"""Likewise with e4m3 weights, a scale a row, and activations, a scale a token: 1.6 percent above
over 18,432 tokens of the repository's prose in float32 arithmetic, of which 1.0 come from the
activations."""
FP8_MLPS_PERPLEXITY_REL = 0.015
"""The same for the weights of MLPs alone, the last sixth of the layers left out: 0.8 percent."""
BFLOAT16_CHOICES = 0.975
"""Share of SmolLM2's next tokens that are float32's, on the repository's prose: 0.983 in float32
arithmetic that rounds where the kernels do. Margins are below 0.05 at one position in twenty."""
FP8_KV_CHOICES = 0.93
"""Likewise with keys and values in e4m3: 0.95."""
CARD_LOGPROB_RMS = 2e-4
"""Log-probabilities of SmolLM2 in float32, on a card beside a CPU."""
ANGLE_ABS = 3e-4
"""Rotary angles beside an implementation that multiplies positions and frequencies in float32."""

FP8_SUM = Tolerance(rms=5e-4, peak=1.5e-3)
"""Products of FP8 tiles on a card: its matrix units keep about 14 bits of a sum of 128 (an H100
showed an RMS of 0.6e-4 to 1.9e-4 over the shapes of the tests)."""


def assert_matches(
    actual: Tensor, reference: Tensor, dtype: torch.dtype, limit: Tolerance | None = None
) -> None:
    """`reference` is float32, computed from the same (rounded) inputs. `limit`: the format's."""
    assert actual.shape == reference.shape
    assert actual.dtype == dtype
    if actual.numel() == 0:
        return
    actual, reference = actual.double(), reference.double()
    assert actual.isfinite().all(), "unwritten or poisoned elements in the output"
    error = actual - reference
    limit = limit or TOLERANCES[dtype]
    rms = (error.square().mean().sqrt() / reference.square().mean().sqrt()).item()
    peak = (error.abs().max() / reference.abs().max()).item()
    assert rms <= limit.rms, f"RMS error {rms:.2e} of the reference, allowed {limit.rms:.2e}"
    assert peak <= limit.peak, f"largest error {peak:.2e}, allowed {limit.peak:.2e}"
