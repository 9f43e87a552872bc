# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of reasoning models that say what a script wants them to, in their families' formats.

Every token has an axis of its own in the hidden state. GPT-OSS's first layer attends evenly to its
window, so that the head sees which tokens came just before; DeepSeek's head sees the last one. All
else is zero. Special tokens are those of the published tokenizers, words are tokens of their own,
any other text is a token a byte.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

SIZE = 512
"""Of the vocabulary and of the hidden state."""
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
HARMONY_WORDS = (
    "analysis", "final", "commentary", "assistant", " I", " think", " so", "Hello", " there",
    " to=functions.add ", "json", '{"a": 12}',
)  # fmt: skip
HARMONY_MARKERS = (
    "<|startoftext|>", "<|endoftext|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
    "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip
Script = dict[tuple[str, ...], str | tuple[str, str]]
"""After the first token, and the second shortly before it, comes the value; of two, the second
where a grammar forbids the first."""
HARMONY_SCRIPT: Script = {
    ("assistant",): "<|channel|>",
    ("<|channel|>",): "analysis",
    ("<|channel|>", " so"): ("final", "commentary"),
    ("<|channel|>", "+"): "commentary",
    ("analysis",): "<|message|>",
    ("<|message|>",): " I",
    (" I",): " think",
    (" think",): " so",
    (" so",): "<|end|>",
    ("<|end|>",): "<|start|>",
    ("<|start|>",): "assistant",
    ("final",): "<|message|>",
    ("<|message|>", "final"): "Hello",
    ("Hello",): " there",
    (" there",): "<|return|>",
    ("commentary",): " to=functions.add ",
    (" to=functions.add ",): "<|constrain|>",
    ("<|constrain|>",): "json",
    ("json",): "<|message|>",
    ("<|message|>", "json"): '{"a": 12}',
    ('{"a": 12}',): "<|call|>",
}
"""A question that ends with + is answered by a call."""
R1_END = "<｜end▁of▁sentence｜>"
R1_WORDS = (
    "<think>", "</think>", " hmm", " ok", "\n\n", "Hi", " all",
    *(f"<｜tool▁{word}｜>" for word in
      ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
)  # fmt: skip
R1_MARKERS = ("<｜begin▁of▁sentence｜>", R1_END, "<｜User｜>", "<｜Assistant｜>")
R1_SCRIPT: Script = {
    ("\n",): " hmm",
    (" hmm",): " ok",
    (" ok",): "</think>",
    ("</think>",): "\n\n",
    ("\n\n",): "Hi",
    ("Hi",): " all",
    (" all",): R1_END,
}
R1_TEMPLATE = (
    "<｜begin▁of▁sentence｜>{% for message in messages %}{% if message.role == 'user' %}"
    "<｜User｜>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


def save_harmony_model(folder: Path) -> None:
    tokenizer = _make_tokenizer(HARMONY_MARKERS, HARMONY_WORDS)
    config = GptOssConfig(
        **SIZES,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.token_to_id("<|startoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|return|>"),
    )
    model = _make_scripted(GptOssForCausalLM(config), tokenizer, HARMONY_SCRIPT)
    attention = model.model.layers[0].self_attn
    attention.sinks.fill_(-50.0)
    attention.v_proj.weight.copy_(torch.eye(SIZE))
    # The norm before attention has made sqrt(SIZE) of a one: each token of the window adds a one.
    attention.o_proj.weight.copy_(torch.eye(SIZE) * WINDOW / SIZE**0.5)
    _save(model, tokenizer, folder, {"eos_token": "<|return|>"})


def save_r1_model(folder: Path) -> None:
    """With a layer to draft with, that follows the script too."""
    tokenizer = _make_tokenizer(R1_MARKERS, R1_WORDS)
    config = DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        bos_token_id=tokenizer.token_to_id(R1_MARKERS[0]),
        eos_token_id=tokenizer.token_to_id(R1_END),
    )
    model = _make_scripted(DeepseekV3ForCausalLM(config), tokenizer, R1_SCRIPT)
    _save(model, tokenizer, folder, {"eos_token": R1_END}, R1_TEMPLATE)
    _add_mtp_layer(folder / "model.safetensors", config.num_hidden_layers)


def _make_tokenizer(markers: tuple[str, ...], words: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in markers])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in words])
    return tokenizer


@torch.no_grad()
def _make_scripted(model: PreTrainedModel, tokenizer: Tokenizer, script: Script) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name))
    model.requires_grad_(False)
    model.model.embed_tokens.weight.copy_(torch.eye(SIZE))

    def index(text: str) -> int:
        [token] = tokenizer.encode(text, add_special_tokens=False).ids
        return int(token)

    # The last token counts twice: 20 for it alone, 18 + 9 or 15 + 7.5 where the other came too.
    for given, following in script.items():
        choices = [(following, 10.0 if len(given) == 1 else 9.0)]
        if not isinstance(following, str):
            choices = list(zip(following, (9.0, 7.5), strict=True))
        for choice, weight in choices:
            for text in given:
                at = index(choice), index(text)
                model.lm_head.weight[at] = max(weight, model.lm_head.weight[at].item())
    return model.eval()


def _save(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    settings: dict[str, str],
    template: str = "",
) -> None:
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (folder / "chat_template.jinja").write_text(template)


def _add_mtp_layer(file: Path, num_layers: int) -> None:
    """Its block adds nothing, and its projection keeps the token that it is given."""
    state = load_file(file)
    source, own = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    for name in [name for name in state if name.startswith(source)]:
        state[own + name.removeprefix(source)] = state[name].clone()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{own}{name}.weight"] = torch.ones(SIZE)
    state[own + "eh_proj.weight"] = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], dim=1)
    state[own + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[own + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, file)
    config_file = file.with_name("config.json")
    config = json.loads(config_file.read_text()) | {"num_nextn_predict_layers": 1}
    config_file.write_text(json.dumps(config))
