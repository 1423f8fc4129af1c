"""Chat templates: helpers, refusals, limits; and conversations as templates get them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.conversation import render_prompt
from gateway.errors import ApiError
from gateway.schemas.chat import Message
from gateway.templates import ChatTemplate, ChatTemplates, render_untrusted
from tandem.tokenizer import TokenizerBundle


def templates(source: str, **named: str) -> ChatTemplates:
    return ChatTemplates(TokenizerBundle(b"{}", source, {"bos_token": "<s>"}, named_templates=named))


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    parsed = [Message.model_validate(message) for message in messages or ({"role": "user", "content": "hi"},)]
    return render_prompt(templates(source), parsed, **more)


def test_helpers_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ {'a': 'é<'} | tojson }}") == '<s>{"a": "é<"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert (
        render("{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.content }}{% endfor %}") == "hi"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}") == "2"


def test_a_refusal_is_told_in_the_templates_words() -> None:
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.code) == (400, "template_refused")


@pytest.mark.parametrize("source", ["{{ messages[0].content + 5 }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"])
def test_a_failing_template_is_a_400(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(source)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 100000000 }}",
        "{{ [0] * 100000000 }}",
        "{{ 9 ** 999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ range(999999999) | list }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        assert "class" not in render(source)
    except ApiError as error:
        assert error.status == 400


def test_a_request_template_that_never_ends_is_thrown_out() -> None:
    source = "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(ApiError, match="took longer"):
        render_untrusted(source, {"s": "x" * 5000})
    assert time.monotonic() - began < 60
    assert render_untrusted("{{ s }}", {"s": "fine"}) == "fine"


def test_broken_and_oversized_sources() -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate("{% if %}")
    assert caught.value.code == "invalid_template"
    with pytest.raises(ApiError, match="characters"):
        ChatTemplate("x" * 100, limit=10)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ApiError, match="no chat template"):
        render("")


def test_a_named_template_is_used_for_tools() -> None:
    both = templates("default", tool_use="with tools")
    assert both.pick(with_tools=True).source == "with tools" and both.pick(with_tools=False).source == "default"


def test_arguments_reach_templates_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    source = "{% if tools %}{% endif %}{{ messages[0].tool_calls[0].function.arguments.a + 1 }}"
    assert render(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == "2"


def test_developer_is_system_unless_known() -> None:
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{# developer #}{{ messages[0].role }}", message) == "developer"


def test_reserved_variables_cannot_be_replaced() -> None:
    with pytest.raises(ApiError, match="messages"):
        render("{{ messages }}", variables={"messages": []})
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
