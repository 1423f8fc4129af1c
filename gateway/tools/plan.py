"""Decides how a request's tools shape its grammar and how its text is parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import bad
from gateway.schemas.chat import ChatBody, NamedTool, Tool
from gateway.tools import forced
from gateway.tools.base import OutputParser, ToolContext
from gateway.tools.deepseek import CALL_BEGIN, DeepSeekParser
from gateway.tools.hermes import OPEN, HermesParser
from gateway.tools.llama3 import TAG, Llama3Parser
from gateway.tools.mistral import MARK, MistralParser
from gateway.tools.pythonic import PythonicParser
from gateway.tools.reasoning import OPEN as THINK
from gateway.tools.reasoning import ThinkParser
from gateway.tools.strict import strict_grammar
from tandem.inference.v1 import inference_pb2 as pb

PARSERS: dict[str, Callable[[ToolContext], OutputParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
}
# Formats whose marks are special tokens, which must stay in the text.
NEEDS_SPECIAL = frozenset({"mistral", "deepseek"})


def detect_format(template: str) -> str:
    """The format that a chat template teaches; hermes where it knows none."""
    for mark, name in ((OPEN, "hermes"), (MARK, "mistral"), (CALL_BEGIN, "deepseek"), (TAG, "llama3")):
        if mark in template:
            return name
    if '"parameters"' in template and "tools" in template:
        return "llama3"
    return "hermes"


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What the tools of a request mean for its answer."""

    structured: pb.StructuredOutput | None
    make_parser: Callable[[str], OutputParser | None]
    keep_special: bool
    # finish_reason is tool_calls when calls were made, also for a named one.
    tools_on: bool


def plan_output(
    body: ChatBody,
    constraint: pb.StructuredOutput | None,
    template: str,
    id_of: Callable[[str], int | None],
    tool_parser: str,
    reasoning_parser: str,
) -> OutputPlan:
    """Checks tools and tool_choice against each other and decides grammar and parser.

    Args:
        body: the request.
        constraint: what the request itself asks of its text.
        template: source of the chat template.
        id_of: the id of a special token by its text.
        tool_parser: a key of PARSERS, or auto.
        reasoning_parser: think, none or auto.

    Raises:
        ApiError: 400 where they contradict.
    """
    tools = body.tools or []
    choice = body.tool_choice
    named = _check_choice(tools, choice)
    if choice is None:
        choice = "auto" if tools else "none"
    context_names = frozenset(tool.function.name for tool in tools)
    parallel = body.parallel_tool_calls is not False
    name = detect_format(template) if tool_parser == "auto" else tool_parser
    thinks = reasoning_parser == "think" or (reasoning_parser == "auto" and THINK in template)

    def context() -> ToolContext:
        return ToolContext(context_names, parallel)

    structured = constraint
    inner: Callable[[], OutputParser | None]
    if named is not None or choice == "required":
        if constraint is not None:
            raise bad("A forced tool call cannot be combined with another constraint.", "tool_choice")
        thinks = False
        if named is not None:
            wanted = named
            structured = pb.StructuredOutput(json_schema=forced.named_schema(wanted))
            inner = lambda: forced.NamedParser(context(), wanted.function.name)  # noqa: E731
        else:
            structured = pb.StructuredOutput(json_schema=forced.required_schema(tools, parallel))
            inner = lambda: forced.RequiredParser(context())  # noqa: E731
    elif choice == "auto" and tools:
        inner = lambda: PARSERS[name](context())  # noqa: E731
        grammar = strict_grammar(name, tools, template, id_of) if constraint is None else None
        if grammar is not None:
            structured = pb.StructuredOutput(grammar=grammar)
    else:
        inner = lambda: None  # noqa: E731

    def make_parser(prompt: str) -> OutputParser | None:
        parser = inner()
        if thinks:
            return ThinkParser(parser, opened=prompt.rstrip().endswith(THINK))
        return parser

    tools_on = bool(tools) and choice != "none"
    forced_call = named is not None or choice == "required"
    keep = tools_on and not forced_call and name in NEEDS_SPECIAL
    return OutputPlan(structured, make_parser, keep, tools_on)


def _check_choice(tools: list[Tool], choice: str | NamedTool | None) -> Tool | None:
    """The tool that a named tool_choice means. Raises ApiError."""
    names = [tool.function.name for tool in tools]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise bad(f"tools holds two functions named {sorted(doubled)[0]!r}.", "tools")
    if choice is None or choice == "none":
        return None
    if not tools:
        raise bad("tool_choice is only allowed when tools are given.", "tool_choice")
    if not isinstance(choice, NamedTool):
        return None
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    raise bad(f"tool_choice names {choice.function.name!r}, which is not among the tools.", "tool_choice")
