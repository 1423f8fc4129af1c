"""An agent that works in steps: the model calls a tool, sees its result, and goes on until it answers in words.

pip install openai
python examples/tool_agent.py "What is 17 times 23?"

The default model is small. Its first step stays on the rails because tool_choice "required" makes the server hold it to
the tools' schemas; whether its choices are wise depends on the model.
"""

from __future__ import annotations

import ast
import datetime
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
MAX_STEPS = 5

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of an expression with + - * / and brackets; nothing else is evaluated."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError("only numbers, + - * / and brackets are understood")

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


def today() -> str:
    return datetime.date.today().isoformat()


TOOLS: dict[str, Callable[..., str]] = {"calculate": calculate, "today": today}


def schema(name: str, description: str, **properties: str) -> dict[str, Any]:
    """A tool whose parameters are all strings."""
    fields = {key: {"type": "string", "description": text, "maxLength": 120} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS = [
    schema("calculate", "Evaluates arithmetic.", expression="such as 3*(4+5)"),
    schema("today", "Today's date."),
]
SYSTEM = "You solve tasks in steps. Use calculate for arithmetic and today for the date. Then answer in one sentence."


def step(client: OpenAI, model: str, messages: list[dict[str, Any]]) -> str | None:
    """One turn of the loop; the final answer, or None while there is none. Adds what happened to `messages`."""
    # A small model would answer at once: it must use a tool first.
    used = any(message["role"] == "tool" for message in messages)
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=SCHEMAS,
        tool_choice="auto" if used else "required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    message = reply.choices[0].message
    if not message.tool_calls:
        return message.content
    messages.append(
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in message.tool_calls]}
    )
    for call in message.tool_calls:
        result = run(call.function.name, call.function.arguments)
        print(f"  {call.function.name} {' '.join(call.function.arguments.split())} → {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def run(name: str, arguments: str) -> str:
    """A tool's result; what is wrong with the call is told to the model."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is 17 times 23?"
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        found = step(client, model, messages)
        if found is not None:
            print(found)
            return
    sys.exit(f"no answer within {MAX_STEPS} steps")


if __name__ == "__main__":
    main()
