# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the model tests."""

from typing import Any

import pytest

from pelton.layers import latent_rows
from pelton.models import deepseek_v3


@pytest.fixture
def parts_of_prefixes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets every row of two tokens or more run un-absorbed, in parts of 50 cached tokens; what is
    returned gets each step's number of such parts."""
    counts: list[int] = []

    def split(*args: Any) -> latent_rows.LatentRows:
        rows = latent_rows.split_rows(*args)
        counts.append(max(len(rows.parts) - 1, 0))
        return rows

    monkeypatch.setattr(deepseek_v3, "split_rows", split)
    monkeypatch.setattr(latent_rows, "runs_unabsorbed", lambda num_tokens, *_: num_tokens > 1)
    monkeypatch.setattr(latent_rows, "WORKSPACE_TOKENS", 50)
    return counts
