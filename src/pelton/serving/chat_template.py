# SPDX-License-Identifier: Apache-2.0
"""Chat messages to the prompt text a model was trained on, by its jinja template.

Templates come from checkpoints and requests, so they run in jinja's sandbox and under a budget:
loop rounds, calls, and the text they build or look through are bounded, and exceeding it is an
error of that request alone. The environment offers what Hugging Face's does: `tojson`,
`raise_exception`, `strftime_now`, loop controls, and the `generation` tag, which marks text and
adds none.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pelton.core.errors import InvalidRequestError
from pelton.serving.template_budget import (
    budget,
    count_operand,
    count_output,
    count_steps,
    count_work,
    counted,
    shallow_size,
    text_size,
)
from pelton.serving.template_filters import check_format, check_method, guard_filters

MAX_SOURCE_CHARS = 2**18
"""Of a template."""
MAX_BITS = 1 << 16
"""Bound on the size of an integer power, and on the product of the sizes of two factors."""
_CACHED_TEMPLATES = 64


class ChatTemplate:
    """`source` None: the model has no template, and `render` needs one from the request."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens written out: encode it without adding more.

        `template` replaces the model's own; `variables` are passed on to it. Raises
        `InvalidRequestError` for messages the template refuses or cannot render.
        """
        source = template or self.source
        if source is None:
            raise InvalidRequestError(
                "This model has no chat template: pass one as chat_template, or use "
                "/v1/completions.",
                param="messages",
            )
        if not messages:
            raise InvalidRequestError("messages must not be empty.", param="messages")
        if template and len(template) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(
                f"chat_template must have at most {MAX_SOURCE_CHARS} characters.",
                param="chat_template",
            )
        param = "chat_template" if template else "messages"
        values = {
            **self._special_tokens,
            **variables,
            "messages": [_with_text_content(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with budget():
                return _compile(source).render(values)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequestError(
                f"The chat template is broken in line {error.lineno}: {error.message}",
                param="chat_template",
            ) from error
        except SyntaxError as error:  # of the Python code that jinja makes of it
            raise InvalidRequestError(
                f"The chat template is broken: {error.msg}.", param="chat_template"
            ) from error
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequestError(
                f"The chat template cannot render these messages: {error or type(error).__name__}",
                param=param,
            ) from error


# What an expression on values of unexpected kinds can raise, besides jinja's own errors.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def _with_text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given as text parts becomes one string, which every template can take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                "Parts of a message's content must be of type 'text' for this model.",
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop round and call counted and repetition bounded."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]  # the same tree

    def count_rounds(self, items: Any) -> Any:
        # Sized items stay what they are, so that `loop.length` and mappings work as written.
        if isinstance(items, (str, list, tuple, dict, range)):
            count_steps(len(items))
            return items
        return items if isinstance(items, jinja2.Undefined) else counted(items)

    def count_operand(self, value: Any) -> Any:
        return count_operand(value)

    def concatenate(self, *values: Any) -> str:
        count_work(sum(map(text_size, values)))
        return "".join(map(str, values))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        wrapped = super().wrap_str_format(value)
        if wrapped is None or not isinstance(owner, str):
            return wrapped

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(owner, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        count_steps()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = check_method(owner, function.__name__, args)
        elif isinstance(owner, (list, tuple)):
            count_work(shallow_size(owner))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            growth = abs(right) if operator == "**" else right.bit_length()
            if left.bit_length() * growth > MAX_BITS:
                raise jinja2.TemplateError("it computes with huge numbers.")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
                    count_work(shallow_size(sized) * times)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            count_work(shallow_size(left) + shallow_size(right))
        elif operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)


class _Guards(NodeTransformer):
    """Routes loops, comparisons, slices and the ~ operator through the environment, which
    counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        count_rounds = nodes.EnvironmentAttribute("count_rounds")
        node.iter = nodes.Call(count_rounds, [node.iter], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        concatenate = nodes.EnvironmentAttribute("concatenate")
        return nodes.Call(concatenate, node.nodes, [], None, None)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _counted_operand(node.expr)
        for operand in node.ops:
            operand.expr = _counted_operand(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _counted_operand(node.node)
        return node


def _counted_operand(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Call(nodes.EnvironmentAttribute("count_operand"), [node], [], None, None)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: its content, as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=count_output,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    del environment.globals["lipsum"]
    guard_filters(environment.filters)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()


@functools.lru_cache(maxsize=_CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)
