# SPDX-License-Identifier: Apache-2.0
"""`pelton roofline`: costs of whole steps, and the table."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pelton.cli.main import make_app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["roofline", *arguments])
    return result.exit_code, result.output


def step_of(output: str) -> tuple[float, float]:
    """Megabytes and GFLOP of the whole step."""
    line = next(line for line in output.splitlines() if line.startswith("step"))
    _, _, megabytes, gigaflops, *_ = line.replace(",", "").split()
    return float(megabytes), float(gigaflops)


def test_a_decode_step_reads_the_weights_and_the_context_once() -> None:
    code, output = run("llama-3.1-8b", "--batch", "1", "--context", "1000")

    assert code == 0
    megabytes, gigaflops = step_of(output)
    products = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096) + 4096 * 128256
    kv = 32 * 2 * 8 * 128 * 1000
    assert megabytes == pytest.approx(2 * (products + kv) / 1e6, rel=0.005)
    assert gigaflops == pytest.approx(2 * products / 1e9, rel=0.05)


def test_a_cache_in_fp8_is_half_the_bytes() -> None:
    shape = ("llama-3.1-8b", "--batch", "64", "--context", "1000")
    (megabytes, _), (fp8_megabytes, _) = (
        step_of(run(*shape, "--kv-cache-dtype", kind)[1]) for kind in ("auto", "fp8")
    )

    kv = 32 * 2 * 8 * 128 * 1000 * 64
    assert megabytes - fp8_megabytes == pytest.approx(kv / 1e6, rel=0.01)


def test_measured_rates_take_the_place_of_the_datasheets() -> None:
    floors = []
    for bandwidth in ("1", "2"):
        _, output = run("smollm2-135m", "--bandwidth", bandwidth, "--teraflops", "1000")
        floors.append(float(re.search(r"At most ([\d,.]+) tok", output)[1].replace(",", "")))

    assert floors[1] == pytest.approx(2 * floors[0], rel=0.01)


def test_a_prefill_is_bound_by_arithmetic() -> None:
    _, output = run("llama-3.1-8b", "--batch", "8", "--new-tokens", "1000", "--context", "1000")

    largest = output.splitlines()[2]
    assert largest.startswith("linear")
    assert "compute" in largest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "3", "--new-tokens", "4"), "at least --new-tokens"),
        (("--card", "abacus"), "h100 or h200"),
        (("--kv-cache-dtype", "float32"), "bfloat16 or fp8"),
        (("--context", "9000"), "made for 8192 tokens"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments, message) -> None:
    code, output = run("smollm2-135m", *arguments)

    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("arguments", "op"), [((), "latent_prefill"), (("--deterministic",), "latent_attention")]
)
def test_a_deterministic_prompt_stays_absorbed(arguments, op) -> None:
    code, output = run(
        "deepseek-v3", "--layers", "2", "--new-tokens", "900", "--context", "900", *arguments
    )  # fmt: skip

    assert code == 0, output
    attention = [line.split()[0] for line in output.splitlines() if line.startswith("latent_")]
    assert attention == [op]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    code, output = run("llama-4")

    assert code == 2
    assert "llama-3.1-405b-fp8" in output


def test_a_step_measured_here_stands_beside_its_floors(tmp_path: Path) -> None:
    code, output = run(
        "smollm2-135m", "--layers", "2", "--batch", "2", "--context", "40", "--measure",
        "--repeats", "1", "--picture", str(tmp_path / "step.png"),
    )  # fmt: skip

    assert code == 0, output
    lines = output.splitlines()
    measured = [
        line.split()[-3] for line in lines if line.startswith(("linear", "paged_attention"))
    ]
    assert len(measured) >= 5
    assert all(float(text.replace(",", "")) > 0 for text in measured)
    assert any(line.startswith("everything else") for line in lines)
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--picture", "step.txt"), "it ends in .png or .svg"),
        (("--speculative", "mtp:2"), "needs a model with an MTP layer"),
        (("--speculative", "ngram:2", "--new-tokens", "5"), "leave --new-tokens out"),
        (("--layers", "999"), "layers"),
        (("--measure", "--context", "8000", "--batch", "100000"), "lower --batch or --context"),
        (("--measure", "--deterministic"), "--deterministic needs a GPU of compute capability 9.0"),
        (("--measure", "--picture", "/nowhere/at/all.png", "--layers", "1"), "/nowhere/at"),
    ],
)
def test_a_step_that_there_is_not_is_one_sentence(
    arguments: tuple[str, ...], sentence: str
) -> None:
    code, output = run("smollm2-135m", *arguments)

    assert code == 2, output
    assert sentence in " ".join(output.split()), output
    assert "Traceback" not in output
