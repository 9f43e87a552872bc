# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: one request a prompt, all answered in one reply."""

import secrets
import time

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.validation import check_prompt_length
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.http.chat import get_deadline, get_reply_options, get_seed
from pelton.serving.http.choice import Choice
from pelton.serving.http.formats import CompletionFormat
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.grammars import check_grammar, read_grammar
from pelton.serving.http.prompts import encode_texts
from pelton.serving.http.replies import Exchange
from pelton.serving.http.sampling import check_prompt_ids, make_sampling
from pelton.serving.http.schema import CompletionRequest
from pelton.serving.http.stream import GenerationReply

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route only."""


async def answer_completion(
    frontend: Frontend, exchange: Exchange, body: CompletionRequest
) -> GenerationReply:
    frontend.check_model(body.model)
    frontend.check_room(priority=body.priority or 0)  # before the work of tokenising
    _refuse_fields(body)
    grammar = read_grammar(body)
    info = frontend.info
    with exchange.span("tokenise"):
        prompts = await _encode_prompts(frontend, body, info.vocab_size)
    for prompt in prompts:
        check_prompt_length(len(prompt), info.max_model_len)
    sampling = _make_sampling(body, info.vocab_size, grammar)
    await check_grammar(frontend, grammar)
    seed, deadline_s = get_seed(body), get_deadline(frontend, exchange, body)
    reply_id = "cmpl-" + secrets.token_hex(12)
    requests = [
        GenerateRequest(
            request_id=f"{reply_id}-{position}" if len(prompts) > 1 else reply_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed,
            priority=body.priority or 0,
            deadline_s=deadline_s,
            cache_salt=body.cache_salt or "",
        )
        for position, prompt in enumerate(prompts)
    ]
    reply_format = CompletionFormat(
        reply_id,
        frontend.served_name,
        int(time.time()),
        frontend.tokenizer,
        has_logprobs=body.logprobs is not None,
        has_token_ids=bool(body.return_token_ids),
    )
    return GenerationReply(
        frontend,
        exchange,
        requests,
        _make_choices(frontend, body, requests, sampling),
        reply_format,
        get_reply_options(frontend, body),
        deadline_s,
    )


def _make_sampling(
    body: CompletionRequest, vocab_size: int, grammar: Grammar | None
) -> SamplingParams:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # only the prompt is wanted; the one token is left out of the reply
    has_prompt_logprobs = bool(body.echo) and body.logprobs is not None
    return make_sampling(
        body,
        vocab_size,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if has_prompt_logprobs else None,
        grammar=grammar,
    )


def _make_choices(
    frontend: Frontend,
    body: CompletionRequest,
    requests: list[GenerateRequest],
    sampling: SamplingParams,
) -> list[Choice]:
    choices: list[Choice] = []
    for request in requests:
        prompt = request.prompt_token_ids
        echoed = frontend.tokenizer.decode(prompt, False) if body.echo else ""
        choices += [
            Choice(
                len(choices) + index,
                request,
                OutputDetokenizer(frontend.tokenizer, prompt, sampling),
                keeps_token_ids=bool(body.return_token_ids),
                echoed_text=echoed,
                drops_output=bool(body.echo) and body.max_tokens == 0,
            )
            for index in range(sampling.n)
        ]
    return choices


async def _encode_prompts(
    frontend: Frontend, body: CompletionRequest, vocab_size: int
) -> list[list[int]]:
    prompt = body.prompt
    add_special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return await encode_texts(frontend, [prompt], add_special)
    if not prompt:
        raise InvalidRequestError(
            "prompt must not be empty: a string, a list of strings, token ids, or a list of lists"
            " of token ids.",
            param="prompt",
        )
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt must not mix strings, token ids and lists of token ids.", param="prompt"
        )
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [ids] if ids else [item for item in prompt if isinstance(item, list)]
    frontend.check_room(1 if ids else len(prompt), body.priority or 0)
    for token_ids in lists:
        check_prompt_ids(token_ids, vocab_size)
    texts = [item for item in prompt if isinstance(item, str)]
    return await encode_texts(frontend, texts, add_special) if texts else lists


def _refuse_fields(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequestError("suffix is not supported: leave it out.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(
            "best_of is not supported unless it equals n: leave it out.", param="best_of"
        )
    if body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise InvalidRequestError("n must be 1 when echo and logprobs are given.", param="n")
