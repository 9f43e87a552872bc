# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize: the model's tokenizer by itself."""

from pelton.core.errors import InvalidRequestError
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.prompts import encode_messages, encode_texts, run_by_size
from pelton.serving.http.replies import Exchange, JSONReply, encode_json
from pelton.serving.http.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


async def answer_tokenize(
    frontend: Frontend, exchange: Exchange, body: TokenizeRequest
) -> JSONReply:
    frontend.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        add_special = body.add_special_tokens is not False
        [tokens] = await encode_texts(frontend, [body.prompt], add_special)
    else:
        tokens = await encode_messages(
            frontend,
            body.messages or [],
            num_body_bytes=exchange.num_body_bytes,
            template=body.chat_template,
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    reply = TokenizeResponse(tokens, len(tokens), frontend.info.max_model_len)
    return JSONReply(exchange, encode_json(reply))


async def answer_detokenize(
    frontend: Frontend, exchange: Exchange, body: DetokenizeRequest
) -> JSONReply:
    frontend.check_model(body.model)
    decode = frontend.tokenizer.decode
    text = await run_by_size(len(body.tokens), decode, body.tokens, skip_special_tokens=False)
    return JSONReply(exchange, encode_json(DetokenizeResponse(text)))
