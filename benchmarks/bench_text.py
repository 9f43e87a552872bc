# SPDX-License-Identifier: Apache-2.0
"""What the frontend's text work costs on one core: opening a model, encoding, detokenising.

    python benchmarks/bench_text.py [MODEL]

Prints the median and the spread of five repeats. The text is English from the standard library's
`pydoc_data`; detokenising is one token a push, as in streaming.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics

from pelton.core.request import FinishReason, SamplingParams
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.tokenizer import Tokenizer

NUM_REPEATS = 5
STOPS: dict[str, tuple[str, ...]] = {
    "no stop strings": (),
    "two rare stop strings": ("\n\nUser:", "###END"),
    "four common beginnings": ("class method", ". Therefore", "the end of", "  \n\n"),
}


def measure(name: str, unit: str, scale: float, run: Callable[[], object]) -> None:
    """`scale`: what one second is in `unit` for each of whatever is counted."""
    values = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        run()
        values.append((time.perf_counter() - start_s) * scale)
    median = statistics.median(values)
    print(f"{name:44} {median:9.3f} {unit}  ({min(values):.3f} to {max(values):.3f})")


def main(model: str) -> None:
    checkpoint = open_checkpoint(model)
    tokenizer = Tokenizer.load(checkpoint)
    texts = list(topics.values())
    encoded = [tokenizer.encode(text) for text in texts]
    num_tokens = sum(map(len, encoded))
    microseconds = 1e6 / num_tokens
    measure("open checkpoint", "ms", 1e3, lambda: open_checkpoint(model))
    measure("make tokenizer", "ms", 1e3, lambda: Tokenizer.load(checkpoint))
    measure("encode", "us/token", microseconds, lambda: [tokenizer.encode(t) for t in texts])
    measure(
        "decode at once", "us/token", microseconds, lambda: list(map(tokenizer.decode, encoded))
    )
    for name, stops in STOPS.items():
        # No stop string may end the output, or less would be measured.
        sampling = SamplingParams(stop=stops, min_tokens=2**31)

        def stream_all(sampling: SamplingParams = sampling) -> None:
            for ids in encoded:
                detokenizer = OutputDetokenizer(tokenizer, [5], sampling)
                for token_id in ids:
                    detokenizer.push([token_id])
                detokenizer.push([], FinishReason.LENGTH)

        measure(f"detokenise, {name}", "us/token", microseconds, stream_all)
    if checkpoint.chat_template is not None:
        template = ChatTemplate(checkpoint.chat_template, tokenizer.special_tokens)
        messages = [{"role": "user", "content": "hello"}] * 9
        measure(
            "render 9 messages", "us", 1e3, lambda: [template.render(messages) for _ in range(1000)]
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
