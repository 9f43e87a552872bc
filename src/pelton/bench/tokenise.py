# SPDX-License-Identifier: Apache-2.0
"""Turns prompts and messages into token ids, as the frontend does, before the clock runs."""

from collections.abc import Sequence
from dataclasses import replace

from pelton.bench.traffic import Sample
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.parsers.formats import OutputFormat
from pelton.serving.prompt_writer import PromptWriter
from pelton.serving.stand_in import STAND_IN_SCHEME, parse_stand_in
from pelton.serving.tokenizer import Tokenizer


def tokenise_samples(samples: Sequence[Sample], model: str) -> list[Sample]:
    if model.startswith(STAND_IN_SCHEME):
        model = parse_stand_in(model).model
    checkpoint = open_checkpoint(model)
    tokenizer = Tokenizer.load(checkpoint)
    template = ChatTemplate(checkpoint.chat_template, tokenizer.special_tokens)
    writer = PromptWriter(template, OutputFormat("auto", "auto", template.source, tokenizer))

    def tokenise(sample: Sample) -> Sample:
        if sample.messages is not None:
            text = writer.render(sample.messages)
            # The template writes the special tokens itself.
            return replace(
                sample,
                messages=None,
                input_tokens=tokenizer.encode(text, add_special_tokens=False),
            )
        if sample.prompt is not None:
            return replace(
                sample,
                prompt=None,
                input_tokens=tokenizer.encode(sample.prompt, add_special_tokens=True),
            )
        return sample

    return [tokenise(sample) for sample in samples]
