# SPDX-License-Identifier: Apache-2.0
"""Which GPU a worker takes, on a machine whose GPUs are pretended."""

import pytest
import torch

from pelton.core.config import Device, WorkerPlace
from pelton.core.errors import ConfigError
from pelton.engine.factory import select_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was made the current one of two GPUs."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_each_worker_takes_its_own(taken: list[int]) -> None:
    places = [WorkerPlace(index=index, num_workers=2) for index in range(2)]
    chosen = [select_device(Device.AUTO, place) for place in places]
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert taken == [0, 1]


def test_more_workers_than_cards_are_refused(taken: list[int]) -> None:
    with pytest.raises(ConfigError, match="--workers 3 needs a GPU for each and there are 2"):
        select_device(Device.AUTO, WorkerPlace(index=0, num_workers=3))
    assert taken == []


def test_on_a_cpu_any_number_may_be(taken: list[int]) -> None:
    place = WorkerPlace(index=2, num_workers=3)
    assert select_device(Device.CPU, place) == torch.device("cpu")
