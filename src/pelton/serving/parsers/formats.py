# SPDX-License-Identifier: Apache-2.0
"""Which way a model writes reasoning and tool calls, and what follows for a request: the parser of
its output, and the grammar that forces a call.

`auto` looks for the markers in the model's chat template (for harmony, in its vocabulary too).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar, lark_text
from pelton.serving.parsers import harmony
from pelton.serving.parsers.harmony import HarmonyParser
from pelton.serving.parsers.message import Parser, PlainParser
from pelton.serving.parsers.reasoning import CLOSE, OPEN, ThinkParser
from pelton.serving.parsers.tool_calls import DEEPSEEK, HERMES, LLAMA3, CallFormat, ToolCallParser
from pelton.serving.tokenizer import Tokenizer

_CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "deepseek": DEEPSEEK,
}
_MAX_NAME_CHARS = 128
_NOT_IN_NAMES = re.compile(r"[\s\x00-\x1f<>\"'`]")
"""Of a function: what would end its name in one of the formats."""
_FREE_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One tool."""

    name: str
    parameters: Any
    is_strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says of tools."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    """A named function is "required" with only that one left in `functions`."""
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


class OutputFormat:
    """Of one model. Fixed when the server starts."""

    def __init__(
        self, tools: str, reasoning: str, template: str | None, tokenizer: Tokenizer
    ) -> None:
        """`tools` and `reasoning`: what the settings say, "auto" included."""
        source = template or ""
        is_harmony = harmony.CHANNEL in source or tokenizer.token_id(harmony.CHANNEL) is not None
        self.tools = _detect_tools(source, is_harmony) if tools == "auto" else tools
        self.reasoning = _detect_reasoning(source, is_harmony) if reasoning == "auto" else reasoning
        self.is_harmony = "harmony" in (self.tools, self.reasoning)
        # DeepSeek's models before V3.1 write a type before the name, and fence the arguments.
        self._has_fences = "```json" in source or DEEPSEEK.noise[0] not in source
        self._tokenizer = tokenizer
        markers: list[str] = []
        if self.is_harmony:
            markers += harmony.MARKERS
        if self.reasoning == "deepseek":
            markers += (OPEN, CLOSE)
        if self.tools in _CALL_FORMATS:
            markers += _CALL_FORMATS[self.tools].markers
        self.token_table = tokenizer.table_with(markers)
        """Bytes by token id: special tokens are empty but for the markers that parsers read."""
        self.stop_token_ids: tuple[int, ...] = ()
        if self.is_harmony:
            ends = (tokenizer.token_id(text) for text in (harmony.CALL, harmony.RETURN))
            self.stop_token_ids = tuple(end for end in ends if end is not None)

    def has_parser(self, use: ToolUse) -> bool:
        return self.is_harmony or self.reasoning != "none" or use.choice != "none"

    def make_parser(self, use: ToolUse, prompt_token_ids: Sequence[int]) -> Parser:
        if self.is_harmony:
            return HarmonyParser(
                takes_calls=use.choice != "none", splits_reasoning=self.reasoning != "none"
            )
        parser: Parser = PlainParser()
        if use.choice != "none":
            parser = ToolCallParser(_CALL_FORMATS[self.tools], use.names)
        if self.reasoning == "deepseek":
            parser = ThinkParser(parser, is_open=self._opens_reasoning(prompt_token_ids))
        return parser

    def check(self, use: ToolUse) -> None:
        """Raises `InvalidRequestError` if calls are wanted that nobody could read."""
        if use.choice != "none" and self.tools == "none":
            raise InvalidRequestError(
                "How this model writes tool calls is not known: start the server with --tool-parser"
                " hermes, llama3, deepseek or harmony, or set tool_choice to 'none'.",
                param="tools",
            )

    def make_grammar(
        self, use: ToolUse, wanted: Grammar | None, prompt_token_ids: Sequence[int]
    ) -> Grammar | None:
        """What the output must look like: a required call, or `wanted` after the reasoning."""
        if use.choice == "required":
            if wanted is not None:
                raise InvalidRequestError(
                    f"{wanted.param} cannot be combined with a tool_choice that requires a call.",
                    param=wanted.param,
                )
            body = self._call_rules(use)
            wanted = Grammar.lark(body, param="tools")
        elif wanted is not None and use.choice == "auto":
            raise InvalidRequestError(
                f"{wanted.param} cannot be combined with tools that may be called: set tool_choice"
                " to 'none'.",
                param=wanted.param,
            )
        if wanted is None:
            return None
        preamble = self._preamble(prompt_token_ids, has_call=use.choice == "required")
        return wanted.after(preamble) if preamble else wanted

    def _preamble(self, prompt_token_ids: Sequence[int], *, has_call: bool) -> str:
        """Lark rules for what comes before the part that a grammar is about."""
        if self.is_harmony:
            channel, message, end, start = map(
                self._mark, (harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.START)
            )
            analysis = f'analysis: {channel} "analysis" {message} TEXT {end} {start} "assistant"'
            final = "" if has_call else f'{channel} "final" {message}'
            return f"preamble: analysis* {final}\n{analysis}\nTEXT: {_FREE_TEXT}"
        if self.reasoning == "deepseek":
            return self._think_preamble(self._prompt_end(prompt_token_ids))
        return ""

    def _think_preamble(self, prompt_end: str) -> str:
        """Reasoning that the prompt has opened, or that the model may open itself."""
        if prompt_end.endswith(CLOSE):
            return ""
        opening, mark = ("", "") if prompt_end.endswith(OPEN) else ("?", self._mark(OPEN))
        if self._is_special(CLOSE):
            rules = f"reasoning: {mark} TEXT {self._mark(CLOSE)} WS\nTEXT: {_FREE_TEXT}"
        else:
            text = f"thought[suffix={lark_text(CLOSE)}]: {_FREE_TEXT}"
            rules = f"reasoning: {mark} thought WS\n{text}"
        return f"preamble: reasoning{opening}\n{rules}\nWS: /\\n*/"

    def _opens_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        return self._prompt_end(prompt_token_ids).endswith(OPEN)

    def _prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_token_ids[-8:], skip_special_tokens=False).rstrip()

    def _is_special(self, text: str) -> bool:
        return self._tokenizer.token_id(text) in self._tokenizer.special_token_ids

    def _mark(self, text: str) -> str:
        """A marker in a Lark rule: the special token it is, or its text."""
        token_id = self._tokenizer.token_id(text)
        return f"<[{token_id}]>" if self._is_special(text) else lark_text(text)

    def _call_rules(self, use: ToolUse) -> str:
        """Lark rules for one or more calls to the functions of `use`."""
        rules, calls = [], []
        for number, function in enumerate(use.functions):
            schema = function.parameters
            if not isinstance(schema, Mapping):
                schema = {"type": "object"}
            options = {"lenient": not function.is_strict, "whitespace_pattern": "[ \\n]{0,8}"}
            arguments = json.dumps({"type": "object", **schema, "x-guidance": options})
            rules.append(f"args{number}: %json {arguments}")
            calls.append(f"({self._call_rule(function.name, f'args{number}')})")
        separators = {"hermes": "\n", "llama3": "; ", "deepseek": "\n" if self._has_fences else ""}
        separator = lark_text(separators[self.tools]) if separators.get(self.tools) else ""
        more = f" ({separator} call)*" if use.is_parallel and self.tools != "harmony" else ""
        start = f"call{more}"
        if self.tools == "deepseek":
            start = f"{self._mark(DEEPSEEK.noise[0])} {start} {self._mark(DEEPSEEK.noise[1])}"
        return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules])

    def _call_rule(self, name: str, arguments: str) -> str:
        quoted = json.dumps(name, ensure_ascii=False)
        if self.tools == "harmony":
            channel, constrain, message = map(
                self._mark, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE)
            )
            header = lark_text(f"commentary to=functions.{name} ")
            return f'{channel} {header} {constrain} "json" {message} {arguments}'
        if self.tools == "deepseek":
            begin, end = self._mark(DEEPSEEK.open[0]), self._mark(DEEPSEEK.close)
            mark = self._mark(DEEPSEEK.noise[2])
            if not self._has_fences:
                return f"{begin} {lark_text(name)} {mark} {arguments} {end}"
            head = f"{lark_text('function')} {mark}"
            fence = lark_text(f"{name}\n```json\n")
            return f"{begin} {head} {fence} {arguments} {lark_text(chr(10) + '```')} {end}"
        field = "parameters" if self.tools == "llama3" else "arguments"
        head = lark_text(f'{{"name": {quoted}, "{field}": ')
        call = f'{head} {arguments} "}}"'
        if self.tools == "llama3":
            return call
        newline = lark_text("\n")
        return (
            f"{self._mark('<tool_call>')} {newline} {call} {newline} {self._mark('</tool_call>')}"
        )


def _detect_tools(template: str, is_harmony: bool) -> str:
    if is_harmony:
        return "harmony"
    if DEEPSEEK.noise[0] in template:
        return "deepseek"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama3"
    return "none"


def _detect_reasoning(template: str, is_harmony: bool) -> str:
    if is_harmony:
        return "harmony"
    return "deepseek" if OPEN in template or CLOSE in template else "none"


def read_tools(tools: Sequence[Any] | None, choice: Any, is_parallel: bool | None) -> ToolUse:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat request."""
    functions = tuple(_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools or ()))
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequestError(
                f"tools[{index}] has the name {name!r:.80} of an earlier one.",
                param=f"tools[{index}]",
            )
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        wanted = function.get("name") if isinstance(function, Mapping) else None
        chosen = tuple(item for item in functions if item.name == wanted)
        if not chosen:
            raise InvalidRequestError(
                f"tool_choice names {wanted!r:.80}, which is not among the tools.",
                param="tool_choice",
            )
        return ToolUse(functions=chosen[:1], choice="required", is_parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequestError(
            "tool_choice must be 'none', 'auto', 'required' or a function of tools, got"
            f" {choice!r:.64}.",
            param="tool_choice",
        )
    if not functions:
        if choice == "required":
            raise InvalidRequestError("tool_choice 'required' needs tools.", param="tool_choice")
        return ToolUse()
    return ToolUse(
        functions=functions, choice=choice or "auto", is_parallel=is_parallel is not False
    )


def _read_tool(path: str, tool: Any) -> Function:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    is_function = isinstance(function, Mapping) and tool.get("type", "function") == "function"
    name = function.get("name") if is_function and function is not None else None
    if function is None or not isinstance(name, str) or not name:
        raise InvalidRequestError(
            f"{path} must be of type 'function' and have a function with a name.", param=path
        )
    if _NOT_IN_NAMES.search(name) or len(name) > _MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"{path}'s name must have at most {_MAX_NAME_CHARS} characters, and no spaces, quotes"
            " or angle brackets.",
            param=path,
        )
    parameters = function.get("parameters")
    is_schema = isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
    if parameters is not None and not is_schema:
        raise InvalidRequestError(
            f"{path}'s parameters must be a JSON schema of type 'object'.", param=path
        )
    return Function(name=name, parameters=parameters, is_strict=function.get("strict") is True)
