# SPDX-License-Identifier: Apache-2.0
"""How near an engine comes to a reference engine on the same text: choices, errors, perplexity.

Both score every position of the text after the tokens before it, so a wrong choice does not change
the positions behind it. A position's margin is the distance of the reference's two likeliest
tokens' log-probabilities: how much error it takes to turn the choice.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.config import DType, EngineConfig, KVCacheDType
from pelton.core.request import GenerateRequest, SamplingParams, TokenLogprobs
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.quantization.fp8_scheme import HIGHEST


@dataclass(frozen=True, slots=True)
class Scores:
    """At every position but the first of each text, in order."""

    logprobs: list[float]
    """Of the text's own tokens."""
    choices: list[int]
    """The likeliest token."""
    margins: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Agreement:
    num_positions: int
    num_equal: int
    """Positions with the reference's choice."""
    rms_error: float
    """Of the text's own tokens' log-probabilities, whatever is chosen."""
    largest_error: float
    largest_lost_margin: float
    """The reference's margin where another token was chosen, at most; 0: nowhere. Two tokens that
    are wrong by `largest_error` each, towards one another, close a margin of twice that."""
    perplexity: float
    perplexity_change: float
    """Relative to the reference's."""

    @property
    def share_equal(self) -> float:
        return self.num_equal / self.num_positions


def score(engine: Engine, texts: Sequence[Sequence[int]]) -> Scores:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    for index, text in enumerate(texts):
        engine.add(
            GenerateRequest(
                request_id=str(index), prompt_token_ids=list(text), sampling=sampling, seed=0
            )
        )
    found: dict[str, list[TokenLogprobs | None]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    entries = [entry for index in range(len(texts)) for entry in found[str(index)] if entry]
    return Scores(
        logprobs=[entry.logprob for entry in entries],
        choices=[entry.top[0][0] for entry in entries],
        margins=[entry.top[0][1] - entry.top[1][1] for entry in entries],
    )


def compare(scores: Scores, reference: Scores) -> Agreement:
    pairs = zip(scores.logprobs, reference.logprobs, strict=True)
    errors = [abs(mine - theirs) for mine, theirs in pairs]
    choices = zip(scores.choices, reference.choices, reference.margins, strict=True)
    lost = [margin for mine, theirs, margin in choices if mine != theirs]
    return Agreement(
        num_positions=len(errors),
        num_equal=len(errors) - len(lost),
        rms_error=math.sqrt(math.fsum(error * error for error in errors) / len(errors)),
        largest_error=max(errors),
        largest_lost_margin=max(lost, default=0.0),
        perplexity=scores.perplexity,
        perplexity_change=scores.perplexity / reference.perplexity - 1,
    )


def cut(token_ids: Sequence[int], length: int) -> list[list[int]]:
    """Pieces of `length` tokens; what is left at the end is dropped."""
    starts = range(0, len(token_ids) - length + 1, length)
    return [list(token_ids[start : start + length]) for start in starts]


def write_checkpoint(
    checkpoint: Checkpoint, folder: Path, *, in_fp8: bool, kept: Sequence[str] = ()
) -> None:
    """A folder with the tensors in bfloat16, without a tokenizer. `in_fp8`: every product's weight
    but the head's in e4m3 with a scale for each row, as compressed-tensors' FP8-dynamic has it;
    those of modules that match a regular expression of `kept` stay in bfloat16."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name in checkpoint.tensor_names:
        weight = checkpoint.read(name).float()
        is_kept = any(re.match(pattern, name) for pattern in kept)
        if in_fp8 and name.endswith("_proj.weight") and not is_kept:
            tensors[name], tensors[name + "_scale"] = quantize_rows(weight)
        else:
            tensors[name] = weight.bfloat16().contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**checkpoint.config, "dtype": "bfloat16"}
    if in_fp8:
        ignored = ["lm_head", *(f"re:{pattern}" for pattern in kept)]
        config["quantization_config"] = {**_FP8_DYNAMIC, "ignore": ignored}
    (folder / "config.json").write_text(json.dumps(config))


def quantize_rows(
    weight: Float[Tensor, "F D"],
) -> tuple[Float[Tensor, "F D"], Float[Tensor, "F 1"]]:
    """e4m3 and the scales of rows, of those that bring a row's largest to between 448 and twice
    that, cut off at 448, the one with the least squared error."""
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / HIGHEST
    least = torch.full_like(largest, math.inf)
    best = largest
    for share in torch.linspace(1.0, 0.5, 33).tolist():
        scale = largest * share
        error = (_cast(weight, scale).float() * scale - weight).square().sum(dim=1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return _cast(weight, best), best


def _cast(weight: Float[Tensor, "F D"], scale: Float[Tensor, "F 1"]) -> Float[Tensor, "F D"]:
    return (weight / scale).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)


_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


FP8_MLPS = "FP8 weights of MLPs"


def compare_formats(
    config: EngineConfig, texts: Sequence[Sequence[int]], folder: Path
) -> dict[str, Agreement]:
    """Number formats against float32 with the checkpoint's weights; "bfloat16, its weights":
    against float32 with the weights that bfloat16 has, which leaves what its arithmetic costs. "FP8
    weights of MLPs": those of attention and of the last sixth of the layers, in which FP8 costs a
    small model most, stay in bfloat16. `folder` takes copies of the checkpoint."""
    checkpoint = open_checkpoint(config.model.model)
    num_layers = checkpoint.config["num_hidden_layers"]
    last = "|".join(str(layer) for layer in range(num_layers - num_layers // 6, num_layers))
    kept = (r".*\.self_attn\.", rf"model\.layers\.({last})\.")
    write_checkpoint(checkpoint, folder / "fp8", in_fp8=True)
    write_checkpoint(checkpoint, folder / "fp8-mlp", in_fp8=True, kept=kept)
    write_checkpoint(checkpoint, folder / "bfloat16", in_fp8=False)

    def run(
        dtype: DType, model: str = "", kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO
    ) -> Scores:
        path = str(folder / model) if model else config.model.model
        engine = make_engine(
            replace(
                config,
                model=replace(config.model, model=path, dtype=dtype),
                cache=replace(config.cache, kv_cache_dtype=kv_cache_dtype),
            )
        )
        return score(engine, texts)

    exact = run(DType.FLOAT32)
    bfloat16 = run(DType.BFLOAT16)
    found = {
        "bfloat16": bfloat16,
        "FP8 weights": run(DType.BFLOAT16, "fp8"),
        FP8_MLPS: run(DType.BFLOAT16, "fp8-mlp"),
        "FP8 cache": run(DType.BFLOAT16, kv_cache_dtype=KVCacheDType.FP8),
        "FP8 weights and cache": run(DType.BFLOAT16, "fp8", KVCacheDType.FP8),
    }
    agreements = {name: compare(scores, exact) for name, scores in found.items()}
    agreements["bfloat16, its weights"] = compare(bfloat16, run(DType.FLOAT32, "bfloat16"))
    return agreements
