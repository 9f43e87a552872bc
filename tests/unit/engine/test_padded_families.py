# SPDX-License-Identifier: Apache-2.0
"""Steps padded as for graphs, small ones with prompts among them, change no token of any family."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.core.clock import MonotonicClock
from pelton.core.config import Device
from pelton.engine import factory
from pelton.engine.decode_step import DecodeOutput
from pelton.engine.engine import Engine
from pelton.engine.input_builder import StepInputs
from tiny_engines import CONFIG, LOADS, generate, make_requests

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", LOADS)
def test_padded_steps_change_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, executor=replace(CONFIG.executor, device=Device.CPU))
    plain = factory.make_engine(config, load=LOADS[family])
    expected = generate(plain, make_requests())
    monkeypatch.setattr(factory, "has_graphs", lambda _: True)
    model, geometry = LOADS[family](config.model, CPU, torch.float32)
    runner: Any = factory.make_runner(model, geometry, plain.config, CPU, torch.float32)
    decode, sizes = runner.decode_step, set()

    def note(inputs: StepInputs) -> DecodeOutput:
        assert inputs.size is not None
        sizes.add(inputs.size)
        return decode(inputs)

    runner.decode_step = note
    engine = Engine(plain.config, geometry, runner, MonotonicClock())
    cold, warm = generate(engine, make_requests()), generate(engine, make_requests())

    assert cold == warm == expected
    assert {size.num_decodes > 0 for size in sizes if not size.row_len} == {False, True}
