# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3's multi-token prediction layer against transformers' own, alone and as a chain."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_deepseek_v3 import SIZES, Tiny, engine_of, save_plain
from tiny_models import make_request, run, tokens_of
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.core.errors import CheckpointError
from pelton.core.geometry import ModelGeometry
from pelton.core.grammar import Grammar
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.engine.grammar import TokenVocabulary
from pelton.models import deepseek_v3
from pelton.models.deepseek_v3_config import Config
from pelton.models.hf_checkpoint import HFCheckpoint
from pelton.models.loader import load_weights
from pelton.quantization.plain import PlainWeight
from tolerance import LOGIT_ABS

LAYERS, LENGTH, BLOCK_SIZE = SIZES["num_hidden_layers"], 21, 8
END = 210
PREFIX = f"model.layers.{LAYERS}."


@dataclass
class Pair:
    reference: DeepseekV3ForCausalLM
    layer: MtpLayer
    folder: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The published layout: the layer's tensors behind the last layer's, and its copies of the
    embedding and the head."""
    folder = tmp_path_factory.mktemp("mtp")
    reference = save_plain(folder).reference
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layer = MtpLayer(reference.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, LAYERS)
        for name, parameter in layer.named_parameters():
            is_norm = "norm" in name
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.1)
        layer.mtp_block.mlp.gate.e_score_correction_bias.normal_(std=0.2)
    state = load_file(folder / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        own = name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if ".experts." not in own:
            state[PREFIX + own] = tensor.clone()
            continue
        for expert, values in enumerate(tensor):
            parts = {"down_proj": values}
            if "gate_up" in own:
                parts = dict(zip(("gate_proj", "up_proj"), values.chunk(2), strict=True))
            for part, value in parts.items():
                key = f"{PREFIX}mlp.experts.{expert}.{part}.weight"
                state[key] = value.clone().contiguous()
    state[PREFIX + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[PREFIX + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors")
    return Pair(reference, layer.eval(), folder)


def load(folder: Path, *, has_mtp: bool) -> deepseek_v3.Model:
    checkpoint = HFCheckpoint(folder)
    config = Config.from_hf(checkpoint.config)
    config = config.with_mtp() if has_mtp else config
    model = deepseek_v3.Model(config)
    load_weights(model, deepseek_v3.weights(config), checkpoint)
    model.pack(PlainWeight)
    return model


def make_batch(cache: Tensor, token_ids: Tensor, first: int) -> ForwardBatch:
    """One row: tokens at positions from `first` on, in blocks in reverse order."""
    count = len(token_ids)
    table = torch.arange(cache.shape[0] - 1, 0, -1, dtype=torch.int32)
    positions = torch.arange(first, first + count)
    slots = table.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    group = KVGroupBatch(cache=cache, block_tables=table[None], slot_mapping=slots.int(), window=0)
    return ForwardBatch(
        token_ids=token_ids.int(),
        positions=positions.int(),
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([first + count], dtype=torch.int32),
        groups=(group,),
        logit_rows=torch.tensor([count - 1], dtype=torch.int32),
        num_decodes=0,
        max_query_len=count,
        max_context_len=first + count,
    )


@torch.no_grad()
def reference_hidden(pair: Pair, hidden: Tensor, next_ids: Tensor) -> Tensor:
    """transformers' layer on whole sequences, without a cache."""
    count = hidden.shape[0]
    positions = torch.arange(count)[None]
    embedded = pair.reference.model.embed_tokens(next_ids[None])
    angles = pair.reference.model.rotary_emb(embedded, position_ids=positions)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    return pair.layer(embedded, hidden[None], angles, mask, positions, None)[0]


@torch.no_grad()
def test_a_chain_equals_transformers(pair: Pair) -> None:
    model = load(pair.folder, has_mtp=True)
    draft = model.mtp_layer()
    assert draft is not None
    [group] = model.config.geometry().kv_groups
    assert len(group.layers) == LAYERS + 1
    shape = (6, LAYERS + 1, 1, BLOCK_SIZE, 1, group.head_dim)
    cache = torch.full(shape, float("nan"))
    text = torch.randint(0, 211, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))

    hidden = model(make_batch(cache, text[:-1], 0))
    got = draft(hidden, text[1:].int(), make_batch(cache, text[:-1], 0))

    with torch.no_grad():
        wanted_hidden = pair.reference.model(text[None, :-1]).last_hidden_state[0]
    inputs, ids = wanted_hidden, text[1:]
    wanted = reference_hidden(pair, inputs, ids)
    for step in range(3):
        logits = draft.logits(got[-1:])[0]
        expected = pair.reference.lm_head(wanted[-1])
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_ABS)
        # The layer's own hidden state and the token it likes best take the next place.
        drafted = logits.argmax()[None]
        inputs, ids = torch.cat((inputs, wanted[-1:])), torch.cat((ids, drafted))
        wanted = reference_hidden(pair, inputs, ids)
        got = draft(got[-1:], drafted.int(), make_batch(cache, drafted, LENGTH + step))


def test_without_drafting_the_layer_is_left_out(pair: Pair) -> None:
    model = load(pair.folder, has_mtp=False)

    assert model.mtp_layer() is None
    assert not [name for name, _ in model.named_modules() if name.startswith("mtp")]
    assert len(model.config.geometry().kv_groups[0].layers) == LAYERS


def test_a_checkpoint_without_the_layer_says_so() -> None:
    config = {**SIZES, "num_nextn_predict_layers": 0}

    with pytest.raises(CheckpointError, match=r"no multi-token prediction layer.*ngram"):
        Config.from_hf(config).with_mtp()


def make_vocabulary(geometry: ModelGeometry) -> TokenVocabulary:
    """Token i is the character number 32 + i, as far as ASCII goes."""
    texts = [chr(32 + i) if i < 95 else "" for i in range(geometry.vocab_size)]
    return TokenVocabulary(
        token_bytes=[text.encode() for text in texts],
        special_token_ids=frozenset({END}),
        eos_token_ids=(END,),
        encode=lambda text: [ord(char) - 32 for char in text],
        vocab_size=geometry.vocab_size,
    )


def make_requests() -> list[GenerateRequest]:
    source = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 211, (n,), generator=source).tolist() for n in (1, 16, 17, 90)]
    few = Grammar.regex("([A-Q]{3}[rst])*")
    controls: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
        {"grammar": few},
        {"grammar": few, "temperature": 1.0, "n": 2, "max_tokens": 9},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "stop_token_ids": tuple(range(0, 211, 9))},
        {"max_tokens": 2},
    ]
    return [
        make_request(f"{p}-{c}", prompt, seed=c, **{"max_tokens": 24, **control})
        for p, prompt in enumerate(prompts)
        for c, control in enumerate(controls)
    ]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[tuple[str, int], RequestOutput]:
    tiny = Tiny(pair.folder, pair.reference)
    return run(engine_of(tiny, load_vocabulary=make_vocabulary), make_requests())


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [64, 13], ids=["whole", "chunks"])
def test_drafting_changes_no_token(
    pair: Pair, plain, num_drafts: int, overlap: bool, budget: int
) -> None:
    engine = engine_of(
        Tiny(pair.folder, pair.reference),
        speculative=f"mtp:{num_drafts}",
        load_vocabulary=make_vocabulary,
        overlap=overlap,
        max_num_batched_tokens=budget,
    )
    cold, warm = run(engine, make_requests()), run(engine, make_requests())

    for got in (cold, warm):
        assert tokens_of(got) == tokens_of(plain)
        for key, output in got.items():
            wanted = plain[key].logprobs or []
            assert [e.logprob for e in output.logprobs or []] == pytest.approx(
                [e.logprob for e in wanted], abs=LOGIT_ABS
            )
    stats = engine.stats()
    assert stats.cached_tokens_total > 0
    assert sum(stats.drafted_total) > 300
    assert stats.num_used_blocks == 0
