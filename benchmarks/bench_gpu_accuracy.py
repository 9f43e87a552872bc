# SPDX-License-Identifier: Apache-2.0
"""How near SmolLM2's real weights come to float32 on a GPU: bfloat16, FP8 weights, an FP8 cache.

    python benchmarks/bench_gpu_accuracy.py [--model smollm2.gguf] [--out record.json]

The text is the repository's own prose (README.md and docs/) in pieces of 513 tokens. The reference
runs in float32 on the same device, which `tests/gpu/test_smollm2.py` holds against the CPU. What
the figures mean is in `pelton.bench.accuracy`.
"""

import argparse
import hashlib
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench_gpu import add_gate_options, test_gate
from pelton.bench.accuracy import compare_formats, cut
from pelton.bench.figures import write_figures
from pelton.core.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    config_hash,
    to_dict,
)
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PIECE = 513


def read_prose() -> str:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text() for page in pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    add_gate_options(parser)
    arguments = parser.parse_args()
    gate = test_gate(arguments)
    config = EngineConfig(
        model=ModelConfig(model=arguments.model, max_model_len=PIECE + 1),
        cache=CacheConfig(num_blocks=1200, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_requests=32, max_num_batched_tokens=4096),
        executor=ExecutorConfig(cuda_graphs=False),
    )
    prose = read_prose()
    texts = cut(Tokenizer.load(open_checkpoint(arguments.model)).encode(prose), PIECE)
    with tempfile.TemporaryDirectory() as folder:
        found = compare_formats(config, texts, Path(folder))
    for name, agreement in found.items():
        print(
            f"{name:24} {agreement.share_equal:7.2%} of {agreement.num_positions} choices,"
            f" lost margins up to {agreement.largest_lost_margin:.3f}, error of log-probabilities"
            f" {agreement.rms_error:.4f} (largest {agreement.largest_error:.3f}),"
            f" perplexity {agreement.perplexity:.3f} ({agreement.perplexity_change:+.2%})"
        )
    if arguments.out is not None:
        figures = {
            "test_gate": gate,
            "model": Path(arguments.model).name,
            "text": {"sha256": hashlib.sha256(prose.encode()).hexdigest(), "piece": PIECE},
            "config": to_dict(config),
            "config_hash": config_hash(config),
            "formats": {
                name: {**asdict(agreement), "share_equal": agreement.share_equal}
                for name, agreement in found.items()
            },
        }
        write_figures(arguments.out, "gpu accuracy", figures, commit=arguments.commit or None)


if __name__ == "__main__":
    main()
