# SPDX-License-Identifier: Apache-2.0
"""How long a two-layer model of each family takes until it answers, from a checkpoint on disk.

python benchmarks/bench_family_startup.py [--repeats 3] [--out record.json]

For each family a small random checkpoint is written in its published format. `LLM(...)` is timed
in a process of its own, imports apart; `pelton serve` from its start to its ready line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench_startup import StartResult, measure
from pelton.bench.figures import write_figures
from pelton.models.geometries import GEOMETRIES
from pelton.models.loader import plan_fills
from pelton.models.registry import find_architecture

SIZES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "deepseek-v3": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "n_routed_experts": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
    },
    "gpt-oss-20b": {
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 16,
    },
}
CONTEXT = 4096
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_TIMED = """
import json, sys, time
start = time.perf_counter()
from pelton.core.request import SamplingParams
from pelton.serving.llm import LLM
import pelton.engine.factory, pelton.models.llama, pelton.models.gpt_oss, pelton.models.deepseek_v3
imported = time.perf_counter()
with LLM(sys.argv[1], device="cpu") as llm:
    ready = time.perf_counter()
    llm.generate(["ab"], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
    answered = time.perf_counter()
print(json.dumps({"imports_s": imported - start, "ready_s": ready - imported,
                  "first_token_s": answered - ready}))
"""


@dataclass(frozen=True, slots=True)
class FamilyStart:
    imports_s: float
    ready_s: float
    """From the call of `LLM(...)` to an engine that takes requests, after imports."""
    first_token_s: float
    server: StartResult
    """The whole of `pelton serve`."""


def write_checkpoint(folder: Path, geometry: str) -> None:
    """Random weights in the published tensors of a two-layer model, and a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    config = {
        **GEOMETRIES[geometry],
        **SIZES[geometry],
        "num_hidden_layers": 2,
        "vocab_size": len(alphabet),
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    architecture = find_architecture(config)
    model_config = architecture.config_from_hf(config)
    with torch.device("meta"):
        outline = architecture.build(model_config)
    fills = plan_fills(outline, architecture.weights(model_config))
    tensors = {fill.source: _random(fill.source, fill.destination) for fill in fills}
    save_file(tensors, folder / "model.safetensors")


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    if like.dtype is torch.uint8:
        return torch.randint(118, 122, like.shape, dtype=torch.uint8)
    if "_scale" in name or "norm" in name:
        return torch.full(like.shape, 0.02 if "_scale" in name else 1.0)
    is_fp8 = like.dtype is torch.float8_e4m3fn
    return (torch.randn(like.shape) * (1.0 if is_fp8 else 0.02)).to(
        like.dtype if is_fp8 else torch.bfloat16
    )


def measure_family(folder: Path) -> FamilyStart:
    command = [sys.executable, "-c", _TIMED, str(folder)]
    timed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return FamilyStart(**json.loads(timed.stdout), server=measure(str(folder), []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    starts: dict[str, list[FamilyStart]] = {}
    for geometry in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), geometry)
            starts[geometry] = [measure_family(Path(name)) for _ in range(arguments.repeats)]
        parts = {
            "imports": [start.imports_s for start in starts[geometry]],
            "LLM(...)": [start.ready_s for start in starts[geometry]],
            "first token": [start.first_token_s for start in starts[geometry]],
            "pelton serve": [start.server.ready_s for start in starts[geometry]],
        }
        text = ", ".join(
            f"{key} {statistics.median(values):.2f} s" for key, values in parts.items()
        )
        print(f"{geometry}, 2 layers, median: {text}")
    if arguments.out is not None:
        figures = {"starts": {key: [asdict(s) for s in value] for key, value in starts.items()}}
        write_figures(arguments.out, "family-startup", figures)


if __name__ == "__main__":
    main()
