# SPDX-License-Identifier: Apache-2.0
"""The filters and text methods that chat templates may use, each counted against the budget."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2.filters import do_indent, do_join, make_attrgetter
from jinja2.nodes import EvalContext

from pelton.serving.template_budget import count_work, counted, shallow_size, text_size

MAX_INDENT = 64
_WIDE = re.compile(r"\d{6}|%[^a-zA-Z%]*\*|\{[^}]*\{")
# Filters that work on the text of a value of any kind.
_TEXT_FILTERS = frozenset(
    [
        "capitalize",
        "center",
        "e",
        "escape",
        "forceescape",
        "lower",
        "string",
        "striptags",
        "title",
        "trim",
        "truncate",
        "upper",
        "urlencode",
        "wordcount",
    ]
)
# Filters that take the same time whatever the size of the value.
_INSTANT_FILTERS = frozenset(("count", "d", "default", "first", "last", "length"))
# Of no use in a prompt, and without a bound on the text or the time that they take.
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which prompts do not want.
    width = indent if isinstance(indent, int) else text_size(indent or "")
    if max(width, text_size(separators or "")) > MAX_INDENT:
        raise jinja2.TemplateError(f"it writes JSON with a width of more than {MAX_INDENT}.")
    count_work(text_size(value, max(width, 0)))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _counting(filter: Callable[..., Any], *, is_of_text: bool) -> Callable[..., Any]:
    """A filter that counts what it looks through, and numbers that its result may grow with.

    jinja passes its context first to a filter that asks for it: not a value of the template.
    """
    num_own = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def counted(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[num_own:]
        count_work(text_size(value) if is_of_text else shallow_size(value))
        for size in (*rest, *kwargs.values()):
            if isinstance(size, int):
                count_work(abs(size))
        return filter(*args, **kwargs)

    return counted


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    check_format(value, args or tuple(kwargs.values()))
    return value % (kwargs or args)


@jinja2.pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: Any = None) -> str:
    items = list(counted(value))
    count_work(text_size(items) + len(items) * text_size(d))
    joined: str = do_join(context, items, d, attribute)
    return joined


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    count_work(text_size(value))
    text = str(value)
    check_method(text, "replace", (str(old), str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    count_work(text_size(value))
    text = str(value)
    size = width if isinstance(width, int) else text_size(width)
    count_work(len(text) + max(size, 0) * (text.count("\n") + 2))
    return do_indent(text, width, first, blank)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    pick = make_attrgetter(environment, attribute) if attribute is not None else _itself
    items = [pick(item) for item in counted(value)]
    if not isinstance(start, list):
        return sum(items, start)
    joined = list(start)
    for item in items:
        count_work(len(item))
        joined += item
    return joined


def _itself(value: Any) -> Any:
    return value


def check_format(text: str, values: Sequence[Any]) -> None:
    """Widths and precisions that would build huge texts, and values that occur many times."""
    if _WIDE.search(text):
        raise jinja2.TemplateError("it formats text with a width of six digits or more, or with *.")
    num_fields = text.count("%") + text.count("{")
    widths = sum(map(int, re.findall(r"\d+", text)))
    count_work(len(text) + widths + num_fields * text_size(values))


def check_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Counts a method of a text; returns its arguments, with those that can be read only once
    made lists."""
    count_work(len(text))
    if name == "replace" and len(args) > 1 and isinstance(args[1], str):
        count_work(text.count(str(args[0])) * len(args[1]))
    elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        for size in args:
            if isinstance(size, int):
                count_work(size * (1 + text.count("\t")))
    elif name == "join" and args:
        items = list(counted(args[0]))
        count_work(text_size(items) + len(items) * len(text))
        return (items, *args[1:])
    elif name == "translate":
        raise jinja2.TemplateError("it calls translate, which is not supported.")
    return args


def guard_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """Replaces or removes jinja's filters so that each is bounded."""
    for name in _REMOVED_FILTERS:
        del filters[name]
    for name, filter in filters.items():
        if name in _INSTANT_FILTERS:
            continue
        filters[name] = _counting(filter, is_of_text=name in _TEXT_FILTERS)
    filters |= {"tojson": _to_json, "format": _format, "join": _join, "replace": _replace}
    filters |= {"indent": _indent, "sum": _sum}
