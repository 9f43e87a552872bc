# SPDX-License-Identifier: Apache-2.0
"""`pelton roofline MODEL`: the least time a step of a model can take on a card, op by op."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pelton.cli.options import user_errors
from pelton.core.config import KVCacheDType
from pelton.core.errors import ConfigError

if TYPE_CHECKING:
    from pelton.perf.hardware import Hardware

_HELP = """Print what one step of MODEL must compute and move, and the least time that takes.

MODEL is a checkpoint, or the name of a geometry that the benchmarks use (llama-3.1-8b); weights
are not read. Each op is bound by its arithmetic or its memory traffic, whichever is longer, and
ops run one after the other. bfloat16 throughout, but for what is stored otherwise.

Examples:

  pelton roofline llama-3.1-8b --batch 256 --context 1500

  pelton roofline llama-3.1-8b --batch 8 --new-tokens 1000 --context 1000 --bandwidth 3.02

  pelton roofline deepseek-v3 --layers 7 --batch 64 --speculative mtp:3

  pelton roofline smollm2 --batch 16 --measure --picture step.png"""


def register(app: typer.Typer) -> None:
    app.command(help=_HELP)(roofline)


def roofline(
    model: Annotated[str, typer.Argument(help="A checkpoint or a known geometry.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each, the new ones too.")] = 1000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each request; 1: a decode.")] = 1,
    speculative: Annotated[
        str, typer.Option(help="Drafts that decodes verify: mtp:K, ngram:K or off.")
    ] = "off",
    layers: Annotated[
        int, typer.Option(min=0, help="Only a known geometry's first so many; 0: all.")
    ] = 0,
    kv_cache_dtype: Annotated[
        KVCacheDType, typer.Option(help="Number format of keys and values, bfloat16 or fp8.")
    ] = KVCacheDType.AUTO,
    deterministic: Annotated[
        bool,
        typer.Option(
            help="As --deterministic runs it: kernels whose results do not depend on the batch."
            " With --measure on a Hopper GPU only."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(help="Run the step on this machine's device and time each op and its limits."),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Of the timed step.")] = 7,
    picture: Annotated[
        Path | None, typer.Option(help="Write the bars as a .png or .svg file.")
    ] = None,
    card: Annotated[
        str, typer.Option(help="h100 or h200: its datasheet's rates, where nothing is measured.")
    ] = "h100",
    bandwidth: Annotated[
        float, typer.Option(min=0, help="TB/s measured on the card; 0: the datasheet's.")
    ] = 0.0,
    teraflops: Annotated[
        float, typer.Option(min=0, help="bfloat16 TFLOP/s measured; 0: the datasheet's.")
    ] = 0.0,
) -> None:
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise typer.BadParameter("it ends in .png or .svg", param_hint="--picture")
    with user_errors():
        from pelton.bench.roofline import draw_rows, make_rows, table_lines
        from pelton.bench.roofline_step import Step, cost_step, measure_step

        step = Step(
            name=model,
            num_rows=batch,
            new_tokens=new_tokens,
            context_len=context,
            speculative=speculative,
            num_layers=layers,
            kv_cache_dtype=kv_cache_dtype,
            is_deterministic=deterministic,
        )
        log = cost_step(step)
        times = None
        if measure:
            from rich.console import Console

            with Console(stderr=True).status("Timing this machine's limits and the step"):
                hardware, times = measure_step(step, repeats)
        else:
            hardware = _hardware(card, bandwidth, teraflops)
    title = (
        f"{model} on {hardware.name}: {_rate(hardware.memory_bytes_per_s, 'B/s')}, "
        f"{_rate(hardware.bf16_flops_per_s, 'FLOP/s')}; {batch} requests, {new_tokens} new "
        f"tokens each, {context} tokens of context"
        f"{', deterministic' if deterministic else ''}"
    )
    rows = make_rows(log, hardware, times)
    typer.echo(title)
    for line in table_lines(rows, batch * new_tokens, times):
        typer.echo(line)
    if picture is not None:
        with user_errors():
            draw_rows(rows, times, title, picture)
        typer.echo(f"Wrote {picture}.")


def _rate(per_s: float, unit: str) -> str:
    return f"{per_s / 1e12:.3g} T{unit}" if per_s >= 1e12 else f"{per_s / 1e9:.3g} G{unit}"


def _hardware(card: str, bandwidth: float, teraflops: float) -> "Hardware":
    from dataclasses import replace

    from pelton.perf.hardware import H100_SXM, H200

    cards = {"h100": H100_SXM, "h200": H200}
    if card not in cards:
        raise ConfigError(f"--card {card} is not known: give {' or '.join(cards)}.", param="card")
    return replace(
        cards[card],
        memory_bytes_per_s=bandwidth * 1e12 or cards[card].memory_bytes_per_s,
        bf16_flops_per_s=teraflops * 1e12 or cards[card].bf16_flops_per_s,
    )
