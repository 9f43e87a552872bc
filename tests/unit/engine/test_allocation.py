# SPDX-License-Identifier: Apache-2.0
"""Memory that cannot be had is one sentence that names a setting, never a trace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pelton.core.errors import CapacityError
from pelton.engine.allocation import allocating, is_out_of_memory

MiB = 2**20


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
def test_what_torch_and_the_system_say_is_a_capacity_error(error: Exception) -> None:
    with pytest.raises(CapacityError) as raised, allocating("cats", "keep fewer", param="n"):
        raise error
    assert raised.value.message == "There is no memory for cats; keep fewer."
    assert raised.value.param == "n"


@pytest.mark.parametrize("num_elements", [2**50, 2**62])
def test_a_tensor_that_no_machine_holds_is_recognised(num_elements: int) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(num_elements, dtype=torch.float64)
    assert is_out_of_memory(raised.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), allocating("a", "b", param="c"):
        raise RuntimeError("shapes differ")


# The address space is bounded to what the process has and a little more, once torch is there.
LIMITED = """
import resource, sys
import torch
import pelton.engine.factory
from pelton import LLM
from pelton.core.errors import CapacityError
model, room, options = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
try:
    LLM(model, dtype="float32", device="cpu", num_threads=1, **options)
except CapacityError as error:
    print(error.param, error.message, sep=": ")
else:
    print("there was enough memory")
"""


@pytest.mark.parametrize(
    ("room", "options", "sentence"),
    [
        (
            256 * MiB,
            {"kv_memory_bytes": 1024 * MiB, "num_blocks": 60_000},
            "num_blocks: There is no memory for 60000 KV blocks; lower --kv-memory-bytes or"
            " --num-blocks.",
        ),
        (
            64 * MiB,
            {"max_num_batched_tokens": 4096, "max_num_requests": 4096, "num_blocks": 1000},
            "lower --max-num-requests, --max-model-len or --max-num-batched-tokens.",
        ),
    ],
)
def test_settings_beyond_the_memory_are_named(
    room: int, options: dict[str, int], sentence: str, tiny_copy: Path
) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16000}))
    arguments = [str(tiny_copy), str(room), repr(options)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.stdout.strip().endswith(sentence), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
