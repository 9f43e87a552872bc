# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek engine on a GPU whose prompts run un-absorbed, beside one that absorbs everything."""

from dataclasses import replace

import pytest

from pelton.engine.factory import make_engine
from pelton.layers import latent_rows
from pelton.models import deepseek_v3
from tiny_engines import CONFIG, LOADS, generate, make_requests

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("budget", [37, 64, 512])
def test_tokens_are_those_of_the_absorbed_form(budget: int, monkeypatch) -> None:
    scheduler = replace(CONFIG.scheduler, max_num_batched_tokens=budget)
    config = replace(CONFIG, scheduler=scheduler)
    monkeypatch.setattr(latent_rows, "runs_unabsorbed", lambda *_: False)
    expected = generate(make_engine(config, load=LOADS["deepseek"]), make_requests())
    num_parts = []

    def split(*args) -> latent_rows.LatentRows:
        rows = latent_rows.split_rows(*args)
        num_parts.append(len(rows.parts))
        return rows

    monkeypatch.setattr(deepseek_v3, "split_rows", split)
    monkeypatch.setattr(latent_rows, "runs_unabsorbed", lambda num_tokens, *_: num_tokens > 1)
    monkeypatch.setattr(latent_rows, "WORKSPACE_TOKENS", 50)
    engine = make_engine(config, load=LOADS["deepseek"])
    num_parts.clear()

    cold = generate(engine, make_requests())
    warm = generate(engine, make_requests())

    assert cold == warm == expected
    assert max(num_parts) >= 5
