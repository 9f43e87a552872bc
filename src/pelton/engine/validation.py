# SPDX-License-Identifier: Apache-2.0
"""Checks a request against the model that it is for; what is wrong is named with its field."""

from array import array
from collections.abc import Collection

from pelton.core.errors import ContextLengthError, InvalidRequestError
from pelton.core.request import GenerateRequest


def validate_request(request: GenerateRequest, vocab_size: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` or `ContextLengthError`."""
    check_prompt_length(len(request.prompt_token_ids), max_model_len)
    _check_token_ids("prompt", request.prompt_token_ids, vocab_size)
    for index, token_ids in request.resumed.items():
        _check_resumed(request, index, token_ids, vocab_size, max_model_len)
    _check_token_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_token_ids("logit_bias", request.sampling.logit_bias, vocab_size)
    if not -(2**63) <= request.seed < 2**63:
        raise InvalidRequestError(
            f"seed must be between {-(2**63)} and {2**63 - 1}, got {request.seed}.", param="seed"
        )


def _check_resumed(
    request: GenerateRequest, index: int, token_ids: list[int], vocab_size: int, max_model_len: int
) -> None:
    _check_token_ids("resumed", token_ids, vocab_size)
    most = max_model_len - len(request.prompt_token_ids)
    most = min(most, request.sampling.max_tokens or most)
    if not 0 <= index < request.sampling.n or len(token_ids) >= most:
        raise InvalidRequestError(
            f"resumed must hold choices below {request.sampling.n} with fewer than {most} tokens"
            f" each, got {len(token_ids)} tokens of choice {index}.",
            param="resumed",
        )


def check_prompt_length(num_prompt_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` or `ContextLengthError`."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt must have at least one token.", param="prompt")
    if num_prompt_tokens + 1 > max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens and the context holds {max_model_len},"
            f" of which one must be left for the output; shorten the prompt to at most"
            f" {max_model_len - 1} tokens.",
            param="prompt",
        )


def _check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    try:
        ids = array("q", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"{param} must hold token ids, integers between 0 and {vocab_size - 1}.", param=param
        ) from error
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} must hold token ids between 0 and {vocab_size - 1}, got {token_id}.",
                param=param,
            )
