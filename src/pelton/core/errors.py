# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, with the HTTP status and OpenAI error type it maps to.

Invariant breaches are `assert`s, never one of these. The message is one sentence that says what
is wrong and what to do instead; `param` names the request field it is about.
"""


class PeltonError(Exception):
    """Root of the tree. `status` is the HTTP status, `type` the OpenAI error type."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(PeltonError):
    """A combination of settings or a file that cannot be used: exit code 2 on the command line."""

    status = 400
    type = "invalid_request_error"


class CheckpointError(ConfigError):
    """A model that is unknown, broken, or does not fit its architecture. Names file and tensor."""


class CapacityError(ConfigError):
    """The memory there is cannot hold what was asked for. Says both figures in bytes and tokens."""


class InvalidRequestError(PeltonError):
    """A request whose fields are wrong: 400, and nothing else in flight notices."""

    status = 400
    type = "invalid_request_error"


class InvalidGrammarError(InvalidRequestError):
    """A schema, regular expression or grammar that cannot be enforced."""

    code = "invalid_grammar"


class ContextLengthError(InvalidRequestError):
    """A prompt, or prompt plus max_tokens, that is longer than the context."""

    code = "context_length_exceeded"


class BodyTooLargeError(InvalidRequestError):
    status = 413
    code = "body_too_large"


class AuthenticationError(PeltonError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ForbiddenError(PeltonError):
    """Who asks may not do this, whatever key they give."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class ConflictError(PeltonError):
    """It cannot be done while things are as they are."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class ModelNotFoundError(PeltonError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class OverloadedError(PeltonError):
    """The bounded queue is full: 429 with Retry-After."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnreachableError(OverloadedError):
    """No worker would start on the request before its deadline: refused before it waits."""

    code = "deadline_unreachable"


class DeadlineExceededError(PeltonError):
    """The request's own deadline passed before it was done."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class UnavailableError(PeltonError):
    """No worker can take the request: starting, draining, or restarting. 503 with Retry-After."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLostError(UnavailableError):
    """The worker that held the request died; the request may be sent again."""

    code = "worker_lost"


class WorkerDrainedError(WorkerLostError):
    """The worker is to end, and its request goes on elsewhere: no loss."""


class NumericalError(PeltonError):
    """The model produced NaN or infinity for this request."""

    code = "non_finite_logits"


class GrammarError(PeltonError):
    """A request's grammar became too complex to follow while its output was made."""

    status = 400
    type = "invalid_request_error"
    code = "grammar_too_complex"


def reason_of(error: Exception) -> str:
    """Without the number and the path that the system's errors come with."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
