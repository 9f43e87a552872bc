# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is computed, once it is known where its request is decoded.

A prompt of which little is left behind the blocks that the decoding worker has cached is computed
there; others go to the prefill worker with the least prefill to do. The decoding worker has the
last word, because it looks into its cache itself, and takes over when the other fails.
"""

from dataclasses import replace

from pelton.core.config import Role
from pelton.core.errors import PeltonError
from pelton.serving.router.booking import Booking
from pelton.serving.router.router import Router
from pelton.serving.router.types import Decision, RouteRequest


def book_prefill(
    router: Router, route: RouteRequest, decode: Decision, min_tokens: int
) -> Booking | None:
    """`route.excluded` names prefill workers. None: the prompt is short, or nobody can take it."""
    if route.num_prompt_tokens - (decode.cached_tokens or 0) < max(min_tokens, 2):
        return None
    try:
        return router.route(replace(route, num_choices=1), Role.PREFILL)
    except PeltonError:  # whatever is wrong is the decoding worker's to say: it has been booked
        return None
