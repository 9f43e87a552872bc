# SPDX-License-Identifier: Apache-2.0
"""Request bodies to structs, with errors that name the field and what it may be."""

import asyncio
import re
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from pelton.core.errors import BodyTooLargeError, DeadlineExceededError, InvalidRequestError
from pelton.serving.http.replies import Exchange

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
_Keys = dict[str, msgspec.Raw]
_AT = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(?P<type>[^`]+)`(?P<limit> (?:matching|of|<|>).*|)$")
_EXPECTED_GOT = re.compile(r"^Expected `(?P<type>[^`]+)`, got `(?P<got>[^`]+)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|.)", re.DOTALL
)
_LONE_SURROGATE = (
    "a string holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; send both"
    " halves, or the character itself"
)
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class InvalidJSONError(InvalidRequestError):
    code = "invalid_json"


class BodyDecoder(Generic[BodyT]):
    """Decodes one kind of body and tells which of its fields the server does not know."""

    def __init__(self, body_type: type[BodyT]) -> None:
        self._decode: Callable[[bytes], BodyT] = msgspec.json.Decoder(body_type).decode
        self._decode_keys = msgspec.json.Decoder(_Keys).decode
        self._known = {field.encode_name for field in msgspec.structs.fields(body_type)}

    def decode(self, body: bytes) -> tuple[BodyT, list[str]]:
        """The body, and the names of its unknown fields in order. Raises `InvalidRequestError`."""
        try:
            decoded = self._decode(body)
            unknown = [key for key in self._decode_keys(body) if key not in self._known]
            if unknown:
                str(body, "utf-8")  # what no field takes was not looked into
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from error
        except msgspec.DecodeError as error:
            reason = _LONE_SURROGATE if _has_lone_surrogate(body) else str(error)
            raise InvalidJSONError(f"The body is not valid JSON: {reason}.") from error
        except UnicodeDecodeError as error:
            raise InvalidJSONError("The body is not valid UTF-8.") from error
        except RecursionError as error:
            raise InvalidJSONError("The body is nested too deeply.") from error
        return decoded, unknown


def _has_lone_surrogate(body: bytes) -> bool:
    """Whether a string holds an escape between \\ud800 and \\udfff that is no half of a pair."""
    return any(match["lone"] for match in _ESCAPE.finditer(body))


def _explain(text: str) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.n`" in the words of a client."""
    match = _AT.search(text)
    path = match["path"].lstrip(".") if match else ""
    reason = text[: match.start()] if match else text
    if missing := _MISSING.match(reason):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"{name} is required.", param=name)
    subject = path or "The body"
    if wrong := _EXPECTED_GOT.match(reason):
        message = f"{subject} must be {_in_words(wrong['type'])}, not {_in_words(wrong['got'])}."
    elif limited := _EXPECTED.match(reason):
        message = f"{subject} must be {_in_words(limited['type'])}{limited['limit']}."
    else:
        message = f"{subject}: {reason}."
    return InvalidRequestError(message, param=path or None)


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))


async def read_body(exchange: Exchange, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body; `BodyTooLargeError` as soon as it is known to exceed `limit_bytes`,
    `DeadlineExceededError` if it has not arrived within `timeout_s`."""
    request = exchange.request
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        exchange.has_unread_body = True
        raise _too_large(limit_bytes)
    message = await request.receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body
    pieces, num_bytes = [body], len(body)
    try:
        async with asyncio.timeout(timeout_s):
            while message.get("more_body"):
                message = await request.receive()
                pieces.append(message.get("body", b""))
                num_bytes += len(pieces[-1])
                if num_bytes > limit_bytes:
                    exchange.has_unread_body = bool(message.get("more_body"))
                    raise _too_large(limit_bytes)
    except TimeoutError:
        exchange.has_unread_body = True
        raise DeadlineExceededError(
            f"The body did not arrive within {timeout_s:g} s; send it faster."
        ) from None
    return b"".join(pieces)


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The body is larger than the {limit_bytes} bytes this server takes; see --max-body-bytes."
    )
