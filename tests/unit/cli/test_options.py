# SPDX-License-Identifier: Apache-2.0
"""Options generated from the configuration tree."""

import pytest
import typer
from typer.testing import CliRunner

from pelton.cli.options import Settings, with_settings
from pelton.core.config import AUTO, DType, EngineConfig, ServerConfig


def run(*arguments: str) -> tuple[int, str, dict[str, object]]:
    app = typer.Typer()
    seen: dict[str, object] = {}

    @app.command()
    @with_settings(EngineConfig, ServerConfig)
    def command(settings: Settings, extra: str = "x") -> None:
        seen["engine"], seen["server"] = settings[EngineConfig], settings[ServerConfig]
        seen["extra"] = extra

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output, seen


def test_defaults_are_the_dataclasses_own() -> None:
    code, _, seen = run("smollm2")

    assert code == 0
    assert seen["engine"] == EngineConfig()
    assert seen["server"] == ServerConfig()


def test_every_kind_of_option_reaches_its_node() -> None:
    code, output, seen = run(
        "folder", "--dtype", "float32", "--kv-memory-bytes", "1.5GiB", "--overlap", "off",
        "--max-num-requests", "7", "--no-prefix-cache", "--port", "0", "--extra", "y",
    )  # fmt: skip
    engine = seen["engine"]

    assert code == 0, output
    assert isinstance(engine, EngineConfig)
    assert (engine.model.model, engine.model.dtype) == ("folder", DType.FLOAT32)
    assert engine.cache.kv_memory_bytes == 3 * 2**29
    assert engine.scheduler.overlap is False
    assert engine.scheduler.max_num_requests == 7
    assert engine.scheduler.max_num_batched_tokens is AUTO
    assert not engine.cache.prefix_cache
    assert seen["extra"] == "y"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["m", "--block-size", "0"], "--block-size must be between 1 and 256, got 0."),
        (["m", "--seed", "9" * 30], "--seed must be a number of at least -9223372036854775808"),
        (["m", "--num-blocks", "9" * 30], "--num-blocks must be a number of at least 2, got 99"),
        (["m", "--request-timeout-s", "nan"], "--request-timeout-s must be a number"),
        (["m", "--drain-timeout-s", "inf"], "--drain-timeout-s must be a number of at least 0"),
        (["m", "--memory-fraction", "nan"], "--memory-fraction must be between 0.1 and 0.99"),
        (["m", "--num-threads", "100000"], "--num-threads must be between 1 and 1024"),
        (["m", "--api-key", "a\nb"], "--api-key must be text without control characters"),
        (["m", "--api-key", "\udcff"], "--api-key must be text"),
        (["m\udcff"], "MODEL must be text"),
        (["m", "--num-blocks", "many"], "neither a number nor 'auto'"),
        (["m", "--kv-memory-bytes", "lots"], "not a size such as 2GiB"),
        (["m", "--log-level", "loud"], "is not one of debug, info"),
        (["m", "--dtype", "float8"], "float8"),
        (["m", "--no-such-option"], "No such option"),
    ],
)
def test_bad_values_exit_2_with_a_sentence(arguments: list[str], sentence: str) -> None:
    code, output, _ = run(*arguments)

    assert code == 2
    assert sentence in " ".join(output.replace("│", " ").split())


def test_what_the_machine_refuses_is_a_sentence_too() -> None:
    app = typer.Typer()

    @app.command()
    @with_settings(EngineConfig)
    def command(settings: Settings) -> None:
        raise OSError(28, "No space left on device")

    result = CliRunner().invoke(app, [])
    assert (result.exit_code, "No space left" in result.output) == (2, True)


def test_a_command_may_have_its_own_default() -> None:
    app = typer.Typer()
    seen: list[bool] = []

    @app.command()
    @with_settings(EngineConfig, defaults={"prefix_cache": False})
    def command(settings: Settings) -> None:
        seen.append(settings[EngineConfig].cache.prefix_cache)

    CliRunner().invoke(app, [])
    CliRunner().invoke(app, ["--prefix-cache"])

    assert seen == [False, True]


def test_help_names_extras_in_brackets() -> None:
    code, output, _ = run("--help")

    assert code == 0
    assert "'pelton[kv]'" in output
