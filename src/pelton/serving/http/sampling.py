# SPDX-License-Identifier: Apache-2.0
"""The sampling fields of a request body to `SamplingParams`."""

from typing import Any

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar
from pelton.core.request import SamplingParams
from pelton.serving.http.schema import GenerationFields

_SAME_NAME = (
    *("n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "seed"),
)


def make_sampling(
    body: GenerationFields,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """`stop_token_ids` come on top of the body's. Raises `InvalidRequestError` naming the field."""
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None
    }
    if body.stop:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids:
        _check_ids("stop_token_ids", body.stop_token_ids, vocab_size)
        stop_token_ids += tuple(body.stop_token_ids)
    if body.logit_bias:
        given["logit_bias"] = _parse_bias(body.logit_bias, vocab_size)
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        stop_token_ids=stop_token_ids,
        **given,
    )


def check_prompt_ids(token_ids: list[int], vocab_size: int) -> None:
    _check_ids("prompt", token_ids, vocab_size)


def _check_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} must hold token ids between 0 and {vocab_size - 1}, got {token_id}.",
                param=param,
            )


def _parse_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_id or int(key) >= vocab_size:
            raise InvalidRequestError(
                "logit_bias must have token ids as keys, between 0 and "
                f"{vocab_size - 1}, got {key[:64]!r}.",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias
