# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, for tokenizer.json and for the vocabulary inside a GGUF file.

Special tokens written out in a text become those tokens, as in Hugging Face's tokenizers. Needs no
torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from pelton.core.errors import CheckpointError, InvalidRequestError, reason_of
from pelton.engine.grammar import TokenVocabulary
from pelton.models.checkpoint import Checkpoint, Vocabulary
from pelton.models.config_keys import ConfigKeys, is_int
from pelton.serving.gguf_tokenizer import make_tokenizer
from pelton.serving.token_bytes import make_token_bytes


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, str],
        add_bos: bool | None,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`add_bos` None: what `backend` does by itself decides."""
        self.vocab_size = vocab_size
        self.special_tokens = special_tokens
        """Role ("bos_token") to text: what chat templates may refer to."""
        self.bos_token_id = bos_token_id
        # As in the engine, an id outside the vocabulary ends nothing.
        self.eos_token_ids = tuple(i for i in eos_token_ids if is_int(i) and 0 <= i < vocab_size)
        self._backend = backend
        # The backend adds its own special tokens only where no setting overrules it.
        self._is_backend_adding = add_bos is None
        self._add_bos = add_bos and bos_token_id is not None
        if add_bos is None:
            self._add_bos = bos_token_id in backend.encode("").ids
        decoded = make_token_bytes(backend, vocab_size)
        self._strips_leading_space = decoded.strips_leading_space
        self.token_bytes = decoded.table
        """By token id, special tokens spelled out."""
        self.special_token_ids = _special_ids(backend, special_tokens.values())
        self.max_token_bytes = max(map(len, self.token_bytes), default=1)
        """A text of n bytes has at least n / max_token_bytes tokens."""
        self.plain_token_bytes = list(self.token_bytes)
        """By token id, special tokens empty."""
        for token_id in self.special_token_ids:
            self.plain_token_bytes[token_id] = b""

    @classmethod
    def load(cls, checkpoint: Checkpoint, vocab_size: int = 0) -> "Tokenizer":
        """`vocab_size` is that of the weights that run; 0: the checkpoint's. Raises
        `CheckpointError` for a tokenizer that is missing, broken or of unknown kind."""
        source = checkpoint.tokenizer
        add_bos: bool | None
        if isinstance(source, Vocabulary):
            backend = make_tokenizer(source)
            special_tokens: Mapping[str, str] = {
                role: source.tokens[token_id] for role, token_id in source.special_token_ids.items()
            }
            add_bos = source.add_bos
        else:
            backend = _read_file(source.path)
            special_tokens, add_bos = source.special_tokens, source.add_bos
        config = checkpoint.config
        eos = config.get("eos_token_id")
        if eos is None and "eos_token" in special_tokens:
            eos = backend.token_to_id(special_tokens["eos_token"])
        bos = config.get("bos_token_id")
        if "bos_token" in special_tokens:  # the tokenizer's own word goes first
            bos = backend.token_to_id(special_tokens["bos_token"])
        return cls(
            backend,
            vocab_size=vocab_size
            or ConfigKeys(config).positive("vocab_size", backend.get_vocab_size()),
            special_tokens=special_tokens,
            add_bos=add_bos,
            bos_token_id=bos,
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """With `add_special_tokens`, a model that wants a beginning-of-sequence token gets exactly
        one, also when the text starts with it. A chat template writes its own: pass False."""
        try:
            # Of one text it would keep Python's lock, for a second and a half a megabyte: no other
            # thread could do anything, not even say that the process lives.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens and self._is_backend_adding
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                "The text holds characters that are not Unicode (a lone surrogate).",
                param="prompt",
            ) from error
        ids: list[int] = encoding.ids
        if not (add_special_tokens and self._add_bos):
            return ids
        bos = self.bos_token_id
        assert bos is not None
        if not self._is_backend_adding and ids[:1] != [bos]:
            return [bos, *ids]
        if self._is_backend_adding and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD. An id outside the vocabulary:
        `InvalidRequestError`."""
        table = self.plain_token_bytes if skip_special_tokens else self.token_bytes
        for token_id in token_ids:
            if not 0 <= token_id < len(table):
                raise InvalidRequestError(
                    f"Token ids must be between 0 and {len(table) - 1}, got {token_id}.",
                    param="tokens",
                )
        text = b"".join([table[token_id] for token_id in token_ids]).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_leading_space else text

    def vocabulary(
        self, eos_token_ids: Sequence[int] = (), vocab_size: int | None = None
    ) -> TokenVocabulary:
        """For grammars. The ids that end an output, and the number of logits, are the engine's to
        say; without them the tokenizer's own."""
        size = self.vocab_size if vocab_size is None else vocab_size
        return TokenVocabulary(
            token_bytes=self.token_bytes,
            special_token_ids=frozenset(i for i in self.special_token_ids if i < size),
            eos_token_ids=tuple(eos_token_ids) or self.eos_token_ids,
            encode=lambda text: self.encode(text, add_special_tokens=False),
            vocab_size=size,
        )

    def token_id(self, text: str) -> int | None:
        """Of a token that is exactly `text`, special or not."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def table_with(self, texts: Iterable[str]) -> list[bytes]:
        """Bytes by token id, special tokens empty but for those among `texts`."""
        table = list(self.plain_token_bytes)
        for text in texts:
            token_id = self.token_id(text)
            if token_id is not None:
                table[token_id] = text.encode()
        return table

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens spelled out: for log-probabilities."""
        return self.token_bytes[token_id].decode(errors="replace")


def _read_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error
    except Exception as error:  # the library raises the bare class for a file it cannot parse
        raise CheckpointError(f"{path} is not a tokenizer: {error}.") from error


def _special_ids(backend: tokenizers.Tokenizer, roles: Iterable[str]) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    ids = {token_id for token_id, token in added.items() if token.special}
    ids.update(i for text in roles if (i := backend.token_to_id(text)) is not None)
    return frozenset(ids)
