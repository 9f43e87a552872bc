# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a request is said at `add`, with the field and the figures."""

import pytest
from engine_harness import VOCAB_SIZE, Harness, make_config, make_request

from pelton.core.errors import ContextLengthError, InvalidRequestError
from pelton.core.request import GenerateRequest


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        pytest.param(make_request("r", []), "prompt", "at least one token", id="empty"),
        pytest.param(
            make_request("r", [1, VOCAB_SIZE]), "prompt", "between 0 and 23, got 24", id="too-high"
        ),
        pytest.param(make_request("r", [-1]), "prompt", "got -1", id="negative"),
        pytest.param(make_request("r", [1.5]), "prompt", "integers between", id="fraction"),
        pytest.param(make_request("r", [2**70]), "prompt", "integers between", id="huge"),
        pytest.param(
            make_request("r", [1], stop_token_ids=(99,)), "stop_token_ids", "got 99", id="stop"
        ),
        pytest.param(
            make_request("r", [1], logit_bias={99: 1.0}), "logit_bias", "got 99", id="bias"
        ),
        pytest.param(make_request("r", [1], seed=2**63), "seed", "between", id="seed"),
    ],
)
def test_a_bad_field_is_named(request_: GenerateRequest, param: str, words: str) -> None:
    harness = Harness(make_config())
    with pytest.raises(InvalidRequestError, match=words) as error:
        harness.engine.add(request_)
    assert error.value.param == param
    assert not harness.engine.has_work


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_the_figures() -> None:
    harness = Harness(make_config(max_model_len=8))
    with pytest.raises(ContextLengthError, match=r"8 tokens and the context holds 8.*at most 7"):
        harness.engine.add(make_request("r", [1] * 8))
    harness.run(make_request("r", [1] * 7))
    assert len(harness.tokens("r")) == 1


def test_an_id_is_free_again_when_its_last_output_was_taken() -> None:
    harness = Harness(make_config())
    harness.engine.add(make_request("r", [1]))
    with pytest.raises(InvalidRequestError, match="'r'") as error:
        harness.engine.add(make_request("r", [2]))
    assert error.value.param == "request_id"
    harness.engine.cancel("r")
    with pytest.raises(InvalidRequestError, match="not ended"):
        harness.engine.add(make_request("r", [2]))
    harness.run()
    harness.outputs.clear()
    harness.run(make_request("r", [2]))
    assert harness.tokens("r")


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_too_many_tokens_are_refused(name: str) -> None:
    values = dict.fromkeys(range(1025), 1.0)
    make_request("r", [1], **{name: dict(list(values.items())[:1024])})
    with pytest.raises(InvalidRequestError, match="at most 1024 tokens, got 1025") as error:
        make_request("r", [1], **{name: values})
    assert error.value.param == name
