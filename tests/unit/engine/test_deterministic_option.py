# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from pelton.core.config import Device, ExecutorConfig
from pelton.core.errors import ConfigError
from pelton.engine.factory import make_engine
from tiny_engines import CONFIG, LOADS


def test_deterministic_is_refused_where_its_kernels_do_not_run() -> None:
    executor = ExecutorConfig(device=Device.CPU, deterministic=True)

    with pytest.raises(ConfigError, match=r"compute capability 9\.0 .* runs on cpu; drop it"):
        make_engine(replace(CONFIG, executor=executor), load=LOADS["llama"])
