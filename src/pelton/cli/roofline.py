# SPDX-License-Identifier: Apache-2.0
"""`pelton roofline MODEL`: the least time a step of a model can take on a card, op by op."""

from typing import TYPE_CHECKING, Annotated

import typer

from pelton.cli.options import user_errors
from pelton.core.config import KVCacheDType
from pelton.core.errors import ConfigError

if TYPE_CHECKING:
    from pelton.perf.cost import CostLog
    from pelton.perf.hardware import Hardware

_HELP = """Print what one step of MODEL must compute and move, and the least time that takes.

MODEL is a checkpoint, or the name of a geometry that the benchmarks use (llama-3.1-8b); weights
are not read. Each op is bound by its arithmetic or its memory traffic, whichever is longer, and
ops run one after the other. bfloat16 throughout, but for what is stored otherwise.

Examples:

  pelton roofline llama-3.1-8b --batch 256 --context 1500

  pelton roofline llama-3.1-8b --batch 8 --new-tokens 1000 --context 1000 --bandwidth 3.02

  pelton roofline deepseek-v3 --layers 7 --batch 64 --speculative mtp:3"""


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
    card: Annotated[str, typer.Option(help="h100 or h200: its datasheet's rates.")] = "h100",
    bandwidth: Annotated[
        float, typer.Option(min=0, help="TB/s measured on the card; 0: the datasheet's.")
    ] = 0.0,
    teraflops: Annotated[
        float, typer.Option(min=0, help="bfloat16 TFLOP/s measured; 0: the datasheet's.")
    ] = 0.0,
    kv_cache_dtype: Annotated[
        KVCacheDType, typer.Option(help="Number format of keys and values, bfloat16 or fp8.")
    ] = KVCacheDType.AUTO,
) -> None:
    with user_errors():
        hardware = _hardware(card, bandwidth, teraflops)
        log = _costs(model, batch, new_tokens, context, speculative, layers, kv_cache_dtype)
    typer.echo(
        f"{model} on {hardware.name}: {hardware.memory_bytes_per_s / 1e12:.2f} TB/s, "
        f"{hardware.bf16_flops_per_s / 1e12:.0f} TFLOP/s; {batch} requests, {new_tokens} new "
        f"tokens each, {context} tokens of context"
    )
    for line in table_lines(log, hardware, batch * new_tokens):
        typer.echo(line)


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


def _costs(
    name: str,
    batch: int,
    new_tokens: int,
    context: int,
    speculative: str,
    layers: int,
    kv_cache_dtype: KVCacheDType,
) -> "CostLog":
    import torch

    from pelton.core.config import CacheConfig, DraftMethod, SpeculativeConfig
    from pelton.engine.kv.pool import select_cache_dtype
    from pelton.engine.resolve import check_drafter, check_kv_cache
    from pelton.engine.step_cost import step_costs
    from pelton.models.build import default_dtype
    from pelton.models.checkpoint import open_checkpoint
    from pelton.models.geometries import GEOMETRIES, find_geometry
    from pelton.models.registry import find_architecture
    from pelton.quantization.plain import PlainWeight

    if kv_cache_dtype is KVCacheDType.FLOAT32:
        raise ConfigError("--kv-cache-dtype is bfloat16 or fp8 beside bfloat16 activations.")
    if new_tokens > context:
        raise ConfigError("--context counts the new tokens too: it is at least --new-tokens.")
    drafts = SpeculativeConfig(speculative=speculative)
    if drafts.num_drafts and new_tokens > 1:
        raise ConfigError(
            "--speculative is about decodes: leave --new-tokens out.", param="speculative"
        )
    if name not in GEOMETRIES and layers:
        raise ConfigError(
            "--layers cuts a known geometry; leave it out for a checkpoint.", param="layers"
        )
    raw = (
        find_geometry(name, layers or None) if name in GEOMETRIES else open_checkpoint(name).config
    )
    architecture = find_architecture(raw)
    config = architecture.config_from_hf(raw)
    check_drafter(drafts, config.geometry(name))
    if drafts.method is DraftMethod.MTP:
        assert architecture.with_mtp is not None, architecture
        config = architecture.with_mtp(config)
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = architecture.build(config)
        model.pack(PlainWeight)
    geometry = config.geometry(name)
    check_kv_cache(kv_cache_dtype, geometry)
    if context > geometry.max_context:
        raise ConfigError(f"{name} was made for {geometry.max_context} tokens; lower --context.")
    return step_costs(
        model,
        geometry,
        num_rows=batch,
        new_tokens=new_tokens,
        context_len=context,
        block_size=CacheConfig().block_size,
        kv_dtype=select_cache_dtype(kv_cache_dtype, torch.bfloat16, torch.device("meta")),
        num_drafts=drafts.num_drafts,
    )


def table_lines(log: "CostLog", hardware: "Hardware", num_tokens: int) -> list[str]:
    """Ops of one name and cost are one line, largest floor first; then the step."""
    from collections import Counter

    from pelton.perf.roofline import floor_s, sum_of_floors_s

    counts = Counter(log.entries)
    rows = sorted(
        (
            (floor_s(cost, hardware) * count, op, cost, count)
            for (op, cost), count in counts.items()
        ),
        key=lambda row: row[0],
        reverse=True,
    )
    total_s = sum_of_floors_s((cost for _, cost in log.entries), hardware)
    lines = [
        f"{'op':<18}{'calls':>6}{'MB':>11}{'GFLOP':>11}{'floor us':>10}{'bound':>9}{'share':>8}"
    ]
    for seconds, op, cost, count in rows:
        is_memory = cost.bytes * hardware.bf16_flops_per_s > cost.flops * (
            hardware.memory_bytes_per_s
        )
        lines.append(
            f"{op:<18}{count:>6}{cost.bytes * count / 1e6:>11,.1f}"
            f"{cost.flops * count / 1e9:>11,.1f}{seconds * 1e6:>10,.1f}"
            f"{'memory' if is_memory else 'compute':>9}{seconds / total_s:>8.1%}"
        )
    step = log.total
    lines.append(
        f"{'step':<18}{len(log.entries):>6}{step.bytes / 1e6:>11,.1f}{step.flops / 1e9:>11,.1f}"
        f"{total_s * 1e6:>10,.1f}{'':>9}{1:>8.1%}"
    )
    lines.append(f"At most {num_tokens / total_s:,.1f} tokens/s.")
    return lines
