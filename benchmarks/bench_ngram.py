# SPDX-License-Identifier: Apache-2.0
"""What prompt lookup (`--speculative ngram:K`) brings and costs on the bundled model.

    python benchmarks/bench_ngram.py [--model smollm2] [--dtype float32] [--out record.json]

Decode speed of one request and of four, plain and with drafts, on text that repeats (where drafts
are accepted) and on ordinary text sampled at temperature 1 (where hardly any is: the honest cost).
Seeds are fixed, so in float32 plain and drafted runs make the same tokens, which is checked, and
differ in speed alone (in 16 bits a row's rounding depends on the rows beside it). Methods take
turns within each repeat. Prefill is not timed.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pelton.bench.figures import write_figures
from pelton.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SpeculativeConfig
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.core.stats import EngineStats
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.tokenizer import Tokenizer

METHODS = ("off", "ngram:3", "ngram:4", "ngram:5")
BATCHES = (1, 4)
NUM_TOKENS = 96
REPEATED = "The quick brown fox jumps over the lazy dog. " * 6
ORDINARY = (
    "A steam engine turns the heat of a fire into work. Water is boiled in a closed vessel, and the"
    " steam pushes a piston to and fro; a crank makes this a rotation. The first engines of this"
    " kind drained mines, and"
)


@dataclass(frozen=True, slots=True)
class Point:
    text: str
    batch: int
    method: str
    tokens_per_s: list[float]
    """Output tokens of all requests a second while decoding, one value a repeat."""
    tokens_per_step: float
    """Mean new tokens of a request's decode step."""
    drafted: list[int]
    """By place in the draft, over all repeats."""
    accepted: list[int]


def make(model: str, dtype: DType, method: str) -> Engine:
    return make_engine(
        EngineConfig(
            model=ModelConfig(model=model, dtype=dtype, max_model_len=512),
            cache=CacheConfig(kv_memory_bytes=2**27, prefix_cache=False),
            speculative=SpeculativeConfig(speculative=method),
        )
    )


def decode(
    engine: Engine, prompt: list[int], batch: int, temperature: float
) -> tuple[float, list[list[int]]]:
    """Tokens a second after every request's first token, and each request's tokens."""
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    for index in range(batch):
        engine.add(
            GenerateRequest(
                request_id=str(index), prompt_token_ids=prompt, sampling=sampling, seed=index
            )
        )
    tokens: dict[str, list[int]] = {str(index): [] for index in range(batch)}
    start_s, num_before = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        if not num_before and all(tokens.values()):
            start_s, num_before = time.perf_counter(), sum(map(len, tokens.values()))
    duration_s = time.perf_counter() - start_s
    return (sum(map(len, tokens.values())) - num_before) / duration_s, list(tokens.values())


def grown(before: EngineStats, after: EngineStats) -> tuple[float, list[int], list[int]]:
    """Tokens a step, drafts and accepted drafts between two moments."""
    pairs = zip(before.drafted_total, after.drafted_total, strict=True)
    drafted = [new - old for old, new in pairs]
    pairs = zip(before.accepted_total, after.accepted_total, strict=True)
    accepted = [new - old for old, new in pairs]
    rows = after.decode_rows_total - before.decode_rows_total
    return 1 + sum(accepted) / rows, drafted, accepted


def measure(
    engines: dict[str, Engine], text: str, prompt: list[int], batch: int, repeats: int
) -> list[Point]:
    temperature = 0.0 if text == "repeated" else 1.0
    speeds: dict[str, list[float]] = {method: [] for method in engines}
    before = {method: engine.stats() for method, engine in engines.items()}
    expected: list[list[int]] = []
    for _ in range(repeats):
        for method, engine in engines.items():
            speed, tokens = decode(engine, prompt, batch, temperature)
            speeds[method].append(speed)
            expected = expected or tokens
            if engine.config.model.dtype is DType.FLOAT32:
                assert tokens == expected, f"{method} made other tokens"
    points = []
    for method, engine in engines.items():
        per_step, drafted, accepted = grown(before[method], engine.stats())
        points.append(Point(text, batch, method, speeds[method], per_step, drafted, accepted))
        median = statistics.median(speeds[method])
        print(
            f"{text:9} batch {batch} {method:8} {median:7.1f} tokens/s"
            f" ({min(speeds[method]):.1f} to {max(speeds[method]):.1f}),"
            f" {per_step:.2f} tokens a step, accepted {accepted} of {drafted}"
        )
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", type=DType, default=DType.FLOAT32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(open_checkpoint(arguments.model))
    engines = {method: make(arguments.model, arguments.dtype, method) for method in METHODS}
    points = []
    for text, content in (("repeated", REPEATED), ("ordinary", ORDINARY)):
        prompt = tokenizer.encode(content)
        for engine in engines.values():
            decode(engine, prompt, 1, 0.0)  # warm-up
        for batch in BATCHES:
            points += measure(engines, text, prompt, batch, arguments.repeats)
    if arguments.out is not None:
        figures = {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "num_tokens": NUM_TOKENS,
            "points": [asdict(point) for point in points],
        }
        write_figures(arguments.out, "ngram", figures)


if __name__ == "__main__":
    main()
