"""Chat templates: the checkpoint's Jinja, sandboxed, with the helpers that templates for transformers expect."""

from __future__ import annotations

import ctypes
import datetime
import json
import threading
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ApiError, bad, unsupported
from tandem.tokenizer import TokenizerBundle

MAX_SOURCE = 512 * 1024
MAX_REQUEST_SOURCE = 64 * 1024
MAX_OUTPUT = 64 * 1024 * 1024
MAX_REPEAT = 1_000_000
REQUEST_RENDER_S = 2.0


class TemplateRefused(jinja2.TemplateError):
    """Raised by a template's raise_exception(): the conversation is not one that the model knows."""


class RenderTimeout(BaseException):
    """Thrown into a rendering thread that takes too long. No Exception, so that a template cannot swallow it."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks assistant text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what one operator can allocate."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("** is not allowed in templates")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > MAX_REPEAT:
                    raise jinja2.TemplateError(f"repetition beyond {MAX_REPEAT} is not allowed in templates")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("% formatting is not allowed in templates")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> _Environment:
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """One compiled template and what it looks at."""

    def __init__(self, source: str, limit: int = MAX_SOURCE) -> None:
        if len(source) > limit:
            raise bad(f"chat_template has {len(source)} characters, but at most {limit} are allowed.", "chat_template")
        env = _environment()
        try:
            tree = env.parse(source)
            self.variables = jinja2.meta.find_undeclared_variables(tree)
            self._template = env.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise bad(f"chat_template cannot be compiled: {error}.", "chat_template", "invalid_template") from None
        self.source = source

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.variables

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt.

        Raises:
            ApiError: 400 with the template's own words where it refuses the conversation.
        """
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise bad(f"The rendered prompt is over {MAX_OUTPUT} characters.", "messages")
                pieces.append(piece)
        except TemplateRefused as error:
            message = f"The model's chat template refuses these messages: {error}."
            raise bad(message, "messages", "template_refused") from None
        except ApiError:
            raise
        except Exception as error:
            # A template is a program; whatever it trips over, it is these messages that it cannot render.
            message = f"The chat template failed on these messages: {type(error).__name__}: {str(error)[:200]}."
            raise bad(message, "messages", "template_failed") from None
        return "".join(pieces)


@lru_cache(maxsize=32)
def _request_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, MAX_REQUEST_SOURCE)


def render_untrusted(source: str, variables: dict[str, Any]) -> str:
    """Renders a template from a request; to be called on a worker thread. It is thrown out after two seconds."""
    template = _request_template(source)
    ident = threading.get_ident()
    done = threading.Lock()

    def interrupt() -> None:
        if done.acquire(blocking=False):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(RenderTimeout))

    timer = threading.Timer(REQUEST_RENDER_S, interrupt)
    timer.daemon = True
    timer.start()
    try:
        result = template.render(variables)
        if not done.acquire(blocking=False):
            # The timer has fired: wait for its exception here rather than let it land in someone else's work.
            threading.Event().wait(1.0)
        return result
    except RenderTimeout:
        raise bad(f"chat_template took longer than {REQUEST_RENDER_S:g} s to render.", "chat_template") from None
    finally:
        timer.cancel()


class ChatTemplates:
    """The templates of one tokenizer: the default one, and named ones such as tool_use."""

    def __init__(self, bundle: TokenizerBundle, override: str = "") -> None:
        self._sources = {"default": override or bundle.chat_template}
        if not override:
            self._sources.update(bundle.named_templates)
        self.special_tokens = dict(bundle.special_tokens)
        self._compiled: dict[str, ChatTemplate] = {}

    @property
    def source(self) -> str:
        return self._sources["default"]

    def pick(self, with_tools: bool) -> ChatTemplate:
        """The template for a conversation.

        Raises:
            ApiError: 400 if the model has none.
        """
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if not self._sources[name]:
            raise unsupported("messages", "this model has no chat template; use /v1/completions")
        found = self._compiled.get(name)
        if found is None:
            try:
                found = ChatTemplate(self._sources[name])
            except ApiError as error:
                # The checkpoint's fault, not the client's.
                raise ApiError(500, error.message, kind="server_error", code="invalid_template") from None
            self._compiled[name] = found
        return found
