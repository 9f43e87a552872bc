# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: its metadata and where its tensors lie.

Read here rather than with the gguf package's reader, which makes an array object of every token
(a second for 50,000 of them) and takes a truncated file for a shorter one. Every read is checked
against the end of the file. Layout: magic, version, counts, key-value pairs, tensor descriptions,
padding, data; little-endian throughout.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.core.errors import CheckpointError, reason_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Slowest axis first, as torch has it (the file stores it the other way round)."""
    ggml_type: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def map_file(path: Path) -> mmap.mmap:
    """The file as private, copy-on-write memory: nothing is read until it is touched."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error


def read_header(path: Path, data: mmap.mmap) -> Header:
    """Raises `CheckpointError` naming the file and the part that is broken."""
    cursor = _Cursor(path, data)
    if cursor.bytes(4, "the magic number") != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{path} is a {kind} GGUF file; little-endian 2 and 3 are supported.")
    num_tensors = cursor.count("the number of tensors", least_bytes=8)
    num_keys = cursor.count("the number of keys", least_bytes=8)
    metadata = dict(_read_pair(cursor, index) for index in range(num_keys))
    infos = [_read_tensor_info(cursor, index) for index in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"general.alignment in {path} must be positive, got {alignment!r}.")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise CheckpointError(f"{path} holds two tensors named {info.name!r}.")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.ggml_type, start + info.offset)
    return Header(metadata, tensors)


def _read_pair(cursor: "_Cursor", index: int) -> tuple[str, Any]:
    key = cursor.text(f"the name of key {index}")
    what = f"the value of {key!r}"
    return key, cursor.value(cursor.scalar("I", what), what)


def _read_tensor_info(cursor: "_Cursor", index: int) -> TensorInfo:
    name = cursor.text(f"the name of tensor {index}")
    what = f"the description of tensor {name!r}"
    num_dimensions = cursor.scalar("I", what)
    if num_dimensions > MAX_DIMENSIONS:
        raise cursor.broken(what, f"it has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q", what) for _ in range(num_dimensions))
    ggml_type = cursor.scalar("I", what)
    return TensorInfo(name, shape[::-1], ggml_type, cursor.scalar("Q", what))


class _Cursor:
    """Reads forward through the file; running past its end is an error that says where."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self._data = data
        self._size = len(data)

    def broken(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is broken at byte {self.position}, {what}: {why}.")

    def _advance(self, num_bytes: int, what: str) -> int:
        """Moves past `num_bytes` and returns where they start."""
        start = self.position
        if num_bytes > self._size - start:
            raise self.broken(what, f"the file ends at byte {self._size}")
        self.position = start + num_bytes
        return start

    def bytes(self, num_bytes: int, what: str) -> bytes:
        start = self._advance(num_bytes, what)
        return self._data[start : start + num_bytes]

    def scalar(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self._data, self._advance(layout.size, what))[0]

    def count(self, what: str, *, least_bytes: int) -> int:
        """A number of items that take at least `least_bytes` each: a wild one is refused here."""
        value: int = self.scalar("Q", what)
        if value * least_bytes > self._size - self.position:
            raise self.broken(what, f"{value} items do not fit in the file")
        return value

    def text(self, what: str) -> str:
        raw = self.bytes(self.scalar("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.broken(what, "it is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.broken(what, f"type {kind} is unknown")
        return self.scalar(_SCALARS[kind], what)

    def _array(self, what: str) -> list[Any]:
        kind = self.scalar("I", what)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            item_bytes = struct.calcsize("<" + code)
            num_items = self.count(what, least_bytes=item_bytes)
            start = self._advance(num_items * item_bytes, what)
            return list(struct.unpack_from(f"<{num_items}{code}", self._data, start))
        num_items = self.count(what, least_bytes=8)
        if kind == _STRING:
            return self._strings(num_items, what)
        if kind == _ARRAY:
            return [self._array(what) for _ in range(num_items)]
        raise self.broken(what, f"element type {kind} is unknown")

    def _strings(self, num_items: int, what: str) -> list[str]:
        # The hot loop of opening a file: hundreds of thousands of tokens and merges.
        data, size, position = self._data, self._size, self.position
        unpack = struct.Struct("<Q").unpack_from
        items = []
        try:
            for _ in range(num_items):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    raise self.broken(what, f"the file ends at byte {size}")
                items.append(data[start:position].decode())
        except struct.error as error:
            raise self.broken(what, f"the file ends at byte {size}") from error
        except UnicodeDecodeError as error:
            raise self.broken(what, f"string {len(items)} is not UTF-8") from error
        self.position = position
        return items
