# SPDX-License-Identifier: Apache-2.0
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import INSTALL_BUNDLED, TokenizerFile, open_checkpoint

WEIGHTS = "model.safetensors"


def test_single_and_sharded_hold_the_same_tensors(tiny_llama) -> None:
    single, sharded = (open_checkpoint(str(p)) for p in (tiny_llama.single, tiny_llama.sharded))
    assert len(list(tiny_llama.sharded.glob("*.safetensors"))) > 1
    assert set(single.tensor_names) == set(sharded.tensor_names)
    for name in single.tensor_names:
        assert single.shape(name) == tuple(single.read(name).shape)
        assert torch.equal(single.read(name), sharded.read(name))


def test_metadata_needs_no_torch(tiny_llama) -> None:
    script = (
        "import sys\n"
        "from pelton.models.checkpoint import open_checkpoint\n"
        "from pelton.models.registry import find_architecture\n"
        "from pelton.serving.tokenizer import Tokenizer\n"
        "import pelton.serving.chat_template, pelton.serving.detokenizer, pelton.serving.llm\n"
        "for model in ('smollm2', sys.argv[1]):\n"
        "    checkpoint = open_checkpoint(model)\n"
        "    checkpoint.chat_template, Tokenizer.load(checkpoint)\n"
        "    config = find_architecture(checkpoint.config).config_from_hf(checkpoint.config)\n"
        "    config.geometry(), [checkpoint.shape(name) for name in checkpoint.tensor_names]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tiny_llama.single)], check=True)


def test_name_template_and_tokenizer_source(tiny_llama) -> None:
    checkpoint = open_checkpoint(str(tiny_llama.single))
    assert checkpoint.name == "tiny-llama"
    assert "<|assistant|>" in (checkpoint.chat_template or "")
    source = checkpoint.tokenizer
    assert isinstance(source, TokenizerFile)
    assert source.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_generation_config_names_the_end_tokens(tiny_copy: Path) -> None:
    (tiny_copy / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert open_checkpoint(str(tiny_copy)).config["eos_token_id"] == [1, 7]


@pytest.mark.parametrize(
    ("template", "expected"),
    [("x", "x"), ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d")],
)
def test_template_in_tokenizer_config(tiny_copy: Path, template: object, expected: str) -> None:
    (tiny_copy / "chat_template.jinja").unlink()
    (tiny_copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert open_checkpoint(str(tiny_copy)).chat_template == expected


def break_header(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:8] + b"{garbage" + raw[16:])


def break_header_length(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 2**60) + file.read_bytes()[8:])


def cut_data(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [break_header, break_header_length, cut_data, cut_header, make_empty, Path.unlink]
)
def test_broken_weights_name_the_file(tiny_copy: Path, damage) -> None:
    damage(tiny_copy / WEIGHTS)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        _ = open_checkpoint(str(tiny_copy)).tensor_names


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json must hold a JSON object"),
        ("config.json", b"\xff\xfe", "config.json cannot be read"),
        ("generation_config.json", b"nonsense", "generation_config.json is not JSON"),
    ],
)
def test_broken_config_names_the_file(
    tiny_copy: Path, file: str, content: bytes, message: str
) -> None:
    (tiny_copy / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tiny_copy))


def test_missing_files_are_named(tiny_copy: Path) -> None:
    (tiny_copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = open_checkpoint(str(tiny_copy)).tokenizer
    (tiny_copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(tiny_copy))


def test_integer_weights_are_refused_by_name(tiny_copy: Path) -> None:
    tensors = load_file(tiny_copy / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, tiny_copy / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*I8"):
        open_checkpoint(str(tiny_copy)).shape("model.norm.weight")


def test_an_index_must_agree_with_its_shards(tiny_llama, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny_llama.sharded, tmp_path / "sharded"))
    index = folder / "model.safetensors.index.json"
    written = json.loads(index.read_text())

    def names_after(weight_map: object) -> object:
        index.write_text(json.dumps({**written, "weight_map": weight_map}))
        return open_checkpoint(str(folder)).tensor_names

    names = dict(written["weight_map"])
    first_shard = next(iter(names.values()))
    with pytest.raises(CheckpointError, match=r"says .* holds 'extra'"):
        names_after({**names, "extra": first_shard})
    with pytest.raises(CheckpointError, match="does not place there"):
        names_after({name: shard for name, shard in names.items() if "norm" not in name})
    with pytest.raises(CheckpointError, match=r"'gone\.safetensors', which is missing"):
        names_after({**names, "extra": "gone.safetensors"})
    with pytest.raises(CheckpointError, match="which is missing"):
        names_after({**names, "extra": "../copy/model.safetensors"})
    with pytest.raises(CheckpointError, match="weight_map"):
        names_after([1])
    (folder / first_shard).unlink()
    with pytest.raises(CheckpointError, match=first_shard):
        names_after(names)


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/file.gguf", ""])
def test_unknown_models_say_what_is_allowed(model: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"smollm2|config\.json"):
        open_checkpoint(model)


def test_the_bundled_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.models.checkpoint.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=re.escape(INSTALL_BUNDLED)):
        open_checkpoint("smollm2")
