# SPDX-License-Identifier: Apache-2.0
"""`pelton eval MODEL --task FILE.jsonl`: how right a model is on the user's own data."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

import pelton
from pelton.bench.evaluation.task import read_task
from pelton.cli.options import Settings, with_settings
from pelton.core.config import EngineConfig, config_hash, to_dict
from pelton.core.errors import ConfigError

_HELP = "\n\n".join(
    (
        "Score MODEL on a task of your own, in this process.",
        "FILE has one JSON object a line. Exact match: prompt (or messages) and answer. Multiple "
        "choice by log-likelihood: prompt, choices and answer, the index of the right one. "
        "Perplexity: text. The result goes to stdout as JSON, or to --out.",
        "Examples:",
        "  pelton eval smollm2 --task questions.jsonl",
        "  pelton eval ./Llama-3.1-8B --task texts.jsonl --out result.json --dtype float32",
    )
)


def register(app: typer.Typer) -> None:
    app.command("eval", help=_HELP)(_evaluate)


@with_settings(EngineConfig)
def _evaluate(
    settings: Settings,
    task: Annotated[Path, typer.Option(help="The task, a JSONL file.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option(help="Where the result goes; without it, stdout.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer of an exact match, in tokens.", min=1)
    ] = 256,
) -> None:
    items = read_task(task)  # before the model is loaded
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out} cannot be written: name a file in a folder that exists.")
    from pelton.bench.evaluation.run import evaluate
    from pelton.serving.llm import LLM

    config = settings[EngineConfig]
    start_s = time.monotonic()
    with LLM.from_config(config) as llm:
        scores = evaluate(
            llm, items, max_tokens=max_tokens, progress=sys.stderr.isatty(), source=str(task)
        )
        result = {
            "pelton": pelton.__version__,
            "model": config.model.model,
            "task": task.name,
            "num_items": len(items),
            "seconds": round(time.monotonic() - start_s, 2),
            "config": to_dict(llm.config),
            "config_hash": config_hash(llm.config),
            **scores.to_dict(),
        }
    text = json.dumps(result, indent=2, ensure_ascii=False, default=str)
    if out is None:
        typer.echo(text)
        return
    out.write_text(text + "\n", encoding="utf-8")
    for name in ("exact_match", "multiple_choice", "perplexity"):
        if name in result:
            shown = {k: v for k, v in result[name].items()}
            typer.echo(f"{name}: " + ", ".join(f"{k} {v:.6g}" for k, v in shown.items()))
