# SPDX-License-Identifier: Apache-2.0
import json
import sys
import threading
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pelton.core.errors import CheckpointError, InvalidRequestError
from pelton.core.grammar import Grammar
from pelton.engine.grammar import GrammarCompiler
from pelton.models.checkpoint import Vocabulary, open_checkpoint
from pelton.serving.gguf_tokenizer import make_tokenizer
from pelton.serving.tokenizer import Tokenizer

HARD_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\n\nnewlines\r\n",
    "digits 1234567890 3.14 1e-9 ١٢٣ ²",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 ❤️",
    "汉字 かな 한국어 ไทย العربية",
    "combining e\u0301 a\u0308\u0323 Z\u0351\u036b",
    "it's we'll I'D don't",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    "<|im_start<|endoftext|>|>",
    "\x00\x1f\x7f\ufeff\u200b",
]


@pytest.fixture(scope="session")
def reference(smollm2_checkpoint) -> Any:
    """transformers' own tokenizer class of this model, over the same vocabulary, splitting as the
    model's published tokenizer.json says."""
    from transformers import GPT2Tokenizer

    source = smollm2_checkpoint.tokenizer
    controls = [
        text for text, kind in zip(source.tokens, source.token_types, strict=True) if kind == 3
    ]
    tokenizer = GPT2Tokenizer(
        vocab={text: token_id for token_id, text in enumerate(source.tokens)},
        merges=[tuple(merge.split(" ")) for merge in source.merges],
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=controls,
        chat_template=smollm2_checkpoint.chat_template,
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_checkpoint) -> Tokenizer:
    return Tokenizer.load(smollm2_checkpoint)


def test_smollm2_encodes_as_transformers_does(smollm2_tokenizer, reference) -> None:
    texts = [*HARD_TEXTS, *topics.values()]
    for text in texts:
        assert smollm2_tokenizer.encode(text) == reference.encode(text), text[:80]


def test_smollm2_sets_every_digit_apart(smollm2_tokenizer) -> None:
    pieces = [smollm2_tokenizer.token_bytes[i] for i in smollm2_tokenizer.encode("x 12 ١٢")]
    assert pieces[:4] == [b"x", b" ", b"1", b"2"]
    assert b"".join(pieces[5:]) == "١٢".encode()
    assert pieces[4] == b" "


def test_smollm2_decodes_as_transformers_does(smollm2_tokenizer, reference) -> None:
    for text in [*HARD_TEXTS, *topics.values()]:
        ids = smollm2_tokenizer.encode(text)
        for skip in (True, False):
            assert smollm2_tokenizer.decode(ids, skip) == reference.decode(
                ids, skip_special_tokens=skip
            )
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_any_ids_decode_as_the_backend_does(smollm2_tokenizer) -> None:
    """Broken byte sequences included."""
    import random

    backend = smollm2_tokenizer._backend
    for _ in range(300):
        ids = random.choices(range(49152), k=20) + random.choices(range(100, 300), k=20)
        random.shuffle(ids)
        assert smollm2_tokenizer.decode(ids) == backend.decode(ids)


def test_roles_and_sizes(smollm2_tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert (smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_ids) == (1, (2,))
    assert smollm2_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2_tokenizer.token_text(2) == "<|im_end|>"
    assert smollm2_tokenizer.special_token_ids == frozenset(range(17))


@pytest.mark.parametrize("token_id", [-1, 49152, 10**12])
def test_ids_outside_the_vocabulary_are_refused(smollm2_tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and 49151"):
        smollm2_tokenizer.decode([5, token_id])


def test_lone_surrogates_are_refused(smollm2_tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm2_tokenizer.encode("a\ud800b")


def test_other_threads_run_while_a_long_text_is_encoded(smollm2_tokenizer) -> None:
    """One of them says that the process lives, which is killed without."""
    may_run, has_run = threading.Event(), threading.Event()

    def run() -> None:
        may_run.wait()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(600.0)  # nobody takes the interpreter's lock from another
    try:
        may_run.set()
        assert len(smollm2_tokenizer.encode("1" * 2**18)) == 2**18
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()


def test_tokenizer_json_is_used_as_it_is(tiny_llama) -> None:
    tokenizer = Tokenizer.load(open_checkpoint(str(tiny_llama.single)))
    backend = Backend.from_file(str(tiny_llama.single / "tokenizer.json"))
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def set_up_bos(folder: Path, *, by_file: bool, setting: bool | None) -> Tokenizer:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if by_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "add_bos_token": setting}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(open_checkpoint(str(folder)))


@pytest.mark.parametrize(
    ("by_file", "setting", "is_added"),
    [
        (True, None, True),
        (True, True, True),
        (False, True, True),
        (True, False, False),
        (False, None, False),
    ],
)
def test_exactly_one_bos_where_the_model_adds_one(
    tiny_copy: Path, by_file: bool, setting: bool | None, is_added: bool
) -> None:
    tokenizer = set_up_bos(tiny_copy, by_file=by_file, setting=setting)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert 0 not in plain
    assert tokenizer.encode("hello") == [0] * is_added + plain
    assert tokenizer.encode("<|begin|>hello") == [0, *plain]
    assert tokenizer.encode("<|begin|>hello", add_special_tokens=False) == [0, *plain]
    assert tokenizer.encode("") == [0] * is_added


def test_padded_vocabularies_decode_to_nothing(tiny_copy: Path) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    tokenizer = Tokenizer.load(open_checkpoint(str(tiny_copy)))
    assert (tokenizer.vocab_size, tokenizer.decode([511])) == (512, "")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', "{}"])
def test_broken_tokenizer_files_are_named(tiny_copy: Path, content: str) -> None:
    (tiny_copy / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(open_checkpoint(str(tiny_copy)))


@pytest.mark.parametrize("size", ["", "x", 0, -1, 1.5, True, [], {"a": 1}, 10**12], ids=repr)
def test_a_vocabulary_of_no_size_is_named(tiny_copy: Path, size: Any) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    with pytest.raises(CheckpointError, match="vocab_size in the model's config"):
        Tokenizer.load(open_checkpoint(str(tiny_copy)))


def test_ends_outside_the_vocabulary_end_nothing(tiny_copy: Path) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    ends = {"eos_token_id": [1, 10**12, -1]}
    for file in tiny_copy.glob("*config.json"):
        if file.name != "tokenizer_config.json":
            file.write_text(json.dumps({**config, **ends}))
    tokenizer = Tokenizer.load(open_checkpoint(str(tiny_copy)))
    assert tokenizer.eos_token_ids == (1,)
    GrammarCompiler(tokenizer.vocabulary).compile(Grammar.regex("[0-9]+"))


def test_unknown_decoders_are_refused(tiny_copy: Path) -> None:
    backend = Backend.from_file(str(tiny_copy / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tiny_copy / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.load(open_checkpoint(str(tiny_copy)))


def make_sentencepiece() -> tuple[Backend, Vocabulary]:
    """A small SentencePiece-like tokenizer, as tokenizer.json has it and as GGUF has it."""
    words = ["▁the", "▁th", "he", "▁t", "▁a", "▁", "th", "t", "h", "e", "a", "é", "▁▁"]
    controls = ["<unk>", "<s>", "</s>"]
    tokens = controls + [f"<0x{byte:02X}>" for byte in range(256)] + words
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    splits = sorted(
        (-scores[ids[word]], ids[word], word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in ids and word[cut:] in ids
    )
    merges = [(left, right) for *_, left, right in splits]
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    vocabulary = Vocabulary(
        path=Path("m.gguf"),
        model="llama",
        pre_tokenizer="default",
        tokens=tokens,
        token_types=[2, 3, 3] + [6] * 256 + [1] * len(words),
        scores=scores,
        special_token_ids={"bos_token": 1, "eos_token": 2, "unk_token": 0},
        add_bos=True,
        add_space_prefix=True,
    )
    return backend, vocabulary


SPACED_TEXTS = ["the the a", "the  hat", "x é 👍 the", "a</s>the", "hathe"]


def test_sentencepiece_from_gguf_equals_tokenizer_json() -> None:
    backend, vocabulary = make_sentencepiece()
    rebuilt = make_tokenizer(vocabulary)
    for text in SPACED_TEXTS:
        assert rebuilt.encode(text).ids == backend.encode(text).ids, text


def test_sentencepiece_decodes_as_the_backend_does() -> None:
    backend, _ = make_sentencepiece()
    tokenizer = Tokenizer(
        backend,
        vocab_size=backend.get_vocab_size(),
        special_tokens={"bos_token": "<s>"},
        add_bos=True,
        bos_token_id=1,
        eos_token_ids=[2],
    )
    for text in SPACED_TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def vocabulary_with(**changes: Any) -> Vocabulary:
    fields = {
        "path": Path("m.gguf"),
        "model": "gpt2",
        "pre_tokenizer": "smollm",
        "tokens": ["a", "b", "ab"],
        "token_types": [1, 1, 1],
        "merges": ["a b"],
        "special_token_ids": {},
        "add_bos": False,
        "add_space_prefix": False,
    }
    return Vocabulary(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"pre_tokenizer": "klingon"}, "'klingon'; supported are smollm"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["a c"]}, "broken"),
        ({"model": "llama", "scores": [1.0]}, "scores"),
    ],
)
def test_vocabularies_that_cannot_be_rebuilt(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_tokenizer(vocabulary_with(**changes))


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_splitting_rules_split_digits_as_their_models_do(rule: str) -> None:
    rebuilt = make_tokenizer(vocabulary_with(pre_tokenizer=rule))
    pieces = [text for text, _ in rebuilt.pre_tokenizer.pre_tokenize_str("x12345")]
    expected = {"gpt-2": ["12345"], "llama-bpe": ["123", "45"]}.get(rule, list("12345"))
    assert pieces == ["x", *expected]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    vocabulary = vocabulary_with(tokens=["a", "b", "[tool]"], token_types=[1, 1, 4], merges=[])
    rebuilt = make_tokenizer(vocabulary)
    assert rebuilt.encode("a[tool]b").ids == [0, 2, 1]
    assert rebuilt.decode([0, 2, 1], skip_special_tokens=True) == "a[tool]b"
