"""Structured output: what is made obeys, what cannot be compiled is named, and nothing else changes it."""

from __future__ import annotations

import asyncio
import json
import re
import time

import jsonschema
import llguidance
import pytest

from engine_service.grammar import GrammarCompiler
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.fakes import BYTE_VOCAB, EOS, FakeRunner, FakeSpeculation
from tests.engine_service.harness import TOKENIZER
from tests.engine_service.server import Answer, ask, serve

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {
            "begin": "<f>",
            "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            "end": "</f>",
        }
    ],
    "triggers": ["<f"],
}


def structured(kind: str, value: object) -> pb.StructuredOutput:
    if kind == "choice":
        return pb.StructuredOutput(choice=pb.ChoiceList(options=value))  # type: ignore[arg-type]
    return pb.StructuredOutput(**{kind: value})  # type: ignore[arg-type]


KINDS = [
    ("json_schema", json.dumps(SCHEMA)),
    ("regex", r"[a-f]{3,5}-[0-9]{2}"),
    ("choice", ["red", "green", 'with "quotes" and \\ and\nlines', "née"]),
    ("grammar", 'start: "<" WORD ("," WORD){1,3} ">"\nWORD: /[a-z]{1,3}/'),
    ("grammar", 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'),
]


def obeys(kind: str, value: object, text: str) -> bool:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(str(value)))
        return True
    if kind == "regex":
        return re.fullmatch(str(value), text) is not None
    if kind == "choice":
        return text in value  # type: ignore[operator]
    if "root" in str(value):
        return re.fullmatch(r"yes|no[0-9]", text) is not None
    return re.fullmatch(r"<[a-z]{1,3}(,[a-z]{1,3}){1,3}>", text) is not None


def request_for(kind: str, value: object, prompt: str, **fields: object) -> pb.GenerateRequest:
    stop = fields.pop("stop", pb.StopConditions(max_tokens=60))
    return ask(prompt, structured=structured(kind, value), stop=stop, **fields)


@pytest.mark.parametrize(("kind", "value"), KINDS, ids=[f"{i}-{kind}" for i, (kind, _value) in enumerate(KINDS)])
async def test_output_obeys_under_every_condition(kind: str, value: object) -> None:
    """Alone, with drafts, in chunks under preemption, and resumed in the middle: the same tokens."""
    prompts = [f"prompt {index}" for index in range(4)]
    most, blocks = (350, 101) if kind == "json_schema" else (30, 12)
    stop = pb.StopConditions(max_tokens=most)
    async with serve(FakeRunner(num_blocks=100, max_model_len=400)) as server:
        alone = [await server.generate(request_for(kind, value, prompt, stop=stop)) for prompt in prompts]
        for answer in alone:
            assert answer.finished().reason == pb.FINISH_REASON_STOP, answer.text()
            assert obeys(kind, value, answer.text()), answer.text()
        for cut in range(0, len(alone[0].deltas()), 3):
            seen = alone[0].deltas()[:cut]
            ids = [token for delta in seen for token in delta.ids]
            sent = "".join(delta.text for delta in seen)
            request = request_for(kind, value, prompts[0], stop=stop)
            request.resume.choices.add(index=0, emitted_ids=ids, text_bytes_sent=len(sent.encode()))
            rest = await server.generate(request)
            assert sent + rest.text() == alone[0].text() and ids + rest.ids() == alone[0].ids()
    runner = FakeRunner(num_blocks=blocks, max_model_len=400)
    speculation = GrammarSpeculation(runner, alone, prompts)
    async with serve(runner, speculation, max_num_batched_tokens=9, prefill_chunk=4) as server:
        together = await asyncio.gather(
            *(server.generate(request_for(kind, value, prompt, stop=stop)) for prompt in prompts)
        )
        assert [answer.ids() for answer in together] == [answer.ids() for answer in alone]
        assert speculation.accepted > 0
        await server.idle()


class GrammarSpeculation(FakeSpeculation):
    """Knows the right answers; appends a wrong byte and more, which grammar or model must refuse."""

    def __init__(self, runner: FakeRunner, answers: list[Answer], prompts: list[str]) -> None:
        whole = [[*prompt.encode(), *answer.ids()] for prompt, answer in zip(prompts, answers, strict=True)]

        def known(prefix: list[int], *_rest: object) -> int:
            for tokens in whole:
                if tokens[: len(prefix)] == prefix and len(tokens) > len(prefix):
                    return tokens[len(prefix)]
            return 7

        super().__init__(known, BYTE_VOCAB)


async def test_json_object() -> None:
    async with serve(FakeRunner(num_blocks=128, max_model_len=400)) as server:
        request = request_for("json_object", True, "any", stop=pb.StopConditions(max_tokens=300))
        request.sampling.temperature = 0.0
        answer = await server.generate(request)
        assert answer.text().startswith("{")
        if answer.finished().reason == pb.FINISH_REASON_STOP:
            assert isinstance(json.loads(answer.text()), dict)


async def test_structural_tag_leaves_free_text_free() -> None:
    text = "free text, then <f>"

    def next_token(prefix: list[int], *_rest: object) -> int:
        position = len(prefix) - 2
        data = text.encode() + b'{"a":3}</f>'
        return data[position] if position < len(data) else EOS

    async with serve(FakeRunner(num_blocks=64, max_model_len=200, next_token=next_token)) as server:
        answer = await server.generate(request_for("structural_tag", json.dumps(TAG), "hi"))
        # The model wanted 3, the schema says 1 or 2.
        assert answer.text().startswith(text)
        inside = re.match(r"free text, then <f>(.*)</f>", answer.text(), re.S)
        assert inside is not None and json.loads(inside[1])["a"] in (1, 2)


async def test_eos_only_where_the_grammar_accepts() -> None:
    def eager(prefix: list[int], *_rest: object) -> int:
        return EOS

    async with serve(FakeRunner(next_token=eager)) as server:
        answer = await server.generate(request_for("regex", "abc[0-9]*", "x"))
        assert answer.text() == "abc" and answer.finished().stop_token_id == EOS


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("json_schema", "{not json", "no valid JSON"),
        ("json_schema", '{"type": "object", "properties": {"a": {"not": {"type": "string"}}}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "http://example.com/x"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", "[" * 100_000, "JSON"),
        ("regex", "(a|b", "unclosed group"),
        ("regex", "(?=x)y", "look-around"),
        ("grammar", 'start: "a" | nothing', "nothing"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", '{"structures": [{"begin": "<g>", "schema": {}}], "triggers": ["<f"]}', "triggers"),
        ("structural_tag", '{"structures": [5], "triggers": ["<f"]}', "structures[0]"),
        ("regex", "a" * 300_000, "at most 262144"),
    ],
)
async def test_what_cannot_be_compiled_is_named(kind: str, value: str, told: str) -> None:
    async with serve() as server:
        with pytest.raises(TandemError) as caught:
            await server.generate(request_for(kind, value, "x"))
        error = caught.value
        assert error.reason == "GRAMMAR" and error.metadata["field"] == f"structured.{kind}"
        assert told in error.message
        assert server.runner.steps == 0 and len(error.message) < 1000


HOSTILE = [
    ("regex", "(.*a){30}.*"),
    ("regex", "((a{1,100}){1,100}){1,100}"),
    ("regex", "(x+x+)+y"),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})),
    ("json_schema", json.dumps({"anyOf": [{"type": "string", "pattern": f"^{'a?' * 20}{i}$"} for i in range(200)]})),
    ("grammar", "start: " + "(" * 2000 + '"a"' + ")" * 2000),
]


@pytest.mark.parametrize(("kind", "value"), HOSTILE, ids=[f"{i}-{kind}" for i, (kind, _value) in enumerate(HOSTILE)])
async def test_hostile_sources_neither_kill_nor_stall(kind: str, value: str) -> None:
    async with serve(FakeRunner(num_blocks=64, max_model_len=200), grammar_timeout_s=2.0) as server:
        hostile = asyncio.create_task(
            server.generate(request_for(kind, value, "x", stop=pb.StopConditions(max_tokens=60)))
        )
        started = time.monotonic()
        plain = await server.generate(ask("normal"))
        assert plain.ids() and time.monotonic() - started < 10
        (result,) = await asyncio.gather(hostile, return_exceptions=True)
        assert isinstance(result, Answer) or (isinstance(result, TandemError) and result.reason == "GRAMMAR"), result
        assert (await server.generate(ask("normal"))).ids() == plain.ids()


async def test_compilation_is_cached_and_copies_are_independent() -> None:
    compiler = GrammarCompiler(TOKENIZER, BYTE_VOCAB, max_bytes=1000, timeout_s=5)
    source = pb.StructuredOutput(regex="ab|cd")
    first, second = await compiler.compile(source), await compiler.compile(source)
    first.accept(list(b"ab"))
    assert first.complete and not second.complete
    assert second.valid_prefix(list(b"cdx")) == 2 and second.valid_prefix(list(b"x")) == 0
    masks = second.masks(list(b"cd"))
    assert masks.shape == (3, (BYTE_VOCAB + 31) // 32)
    allowed = [[token for token in range(BYTE_VOCAB) if row[token // 32] >> (token % 32) & 1] for row in masks]
    assert allowed[0] == [ord("a"), ord("c")] and allowed[1] == [ord("d")] and allowed[2] == [EOS]
    # Looking ahead left no trace.
    second.accept(list(b"ab"))
    with pytest.raises(TandemError):
        second.accept(list(b"c"))
    compiler.close()


async def test_warm_up_leaves_the_first_request_only_its_own_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    original = llguidance.LLTokenizer

    def counted(*args: object, **kwargs: object) -> llguidance.LLTokenizer:
        built.append("tokenizer")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(llguidance, "LLTokenizer", counted)
    compiler = GrammarCompiler(TOKENIZER, BYTE_VOCAB, max_bytes=1000, timeout_s=10)
    await asyncio.wrap_future(compiler.warm())
    assert built == ["tokenizer"]
    await asyncio.gather(*(compiler.compile(structured("regex", f"a{{{count}}}")) for count in range(1, 6)))
    assert built == ["tokenizer"]
    compiler.close()
