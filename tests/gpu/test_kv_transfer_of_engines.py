# SPDX-License-Identifier: Apache-2.0
"""Two engines on one GPU, blocks copied between their pools there: as one engine answers.

Both are in one process, where the driver opens no handle, so a handle here is an address; between
processes `test_kv_transfer` moves blocks.
"""

import pytest

from kv_cases import LENGTHS, make_engine_of, make_request, pair_of, run_alone, run_pair
from pelton.core.config import Device, Role
from pelton.serving.kv_transfer.cuda_ipc import _Driver

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def handles_are_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Driver, "export", lambda _, base: base.to_bytes(8, "little"))
    monkeypatch.setattr(_Driver, "open", lambda _, memory: int.from_bytes(memory, "little"))
    monkeypatch.setattr(_Driver, "close", lambda *_: None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "deepseek-mtp", "twin-mtp"])
def test_answers_are_those_of_one_engine(family: str, overlap: bool) -> None:
    settings = {"device": Device.CUDA, "overlap": overlap}
    alone = make_engine_of(family, Role.MIXED, None, **settings)
    num_accepted = 0
    with pair_of(family, **settings) as pair:
        for seed in range(3):
            requests = [make_request(str(length), length, seed) for length in LENGTHS]
            answers, expected = run_pair(pair, requests), run_alone(alone, requests)
            tokens = {key: answer.token_ids for key, answer in answers.items()}
            assert tokens == {key: answer.token_ids for key, answer in expected.items()}
            num_accepted += sum(answer.num_accepted for answer in answers.values())
        stats = pair.decode.stats()
    assert (stats.pulls_total, stats.pull_fallbacks_total) == (3 * (len(LENGTHS) - 1), 0)
    assert (family == "twin-mtp") <= (num_accepted > 0)
