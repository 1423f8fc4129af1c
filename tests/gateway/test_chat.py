"""POST /v1/chat/completions: shape, template, tools, reasoning, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL, NUMERICS, tokenizer
from tests.gateway.sse import read_events

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "red green blue"}]
PATH = "/v1/chat/completions"


def chat(stand: Stand, status: int = 200, **body: Any) -> Any:
    body = {"messages": ASK, "temperature": 0, "max_tokens": 8, **body}
    answer = stand.post(PATH, {k: v for k, v in body.items() if v is not ...})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_chat_has_the_whole_shape(stand: Stand) -> None:
    answer = chat(stand)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == MODEL and answer["system_fingerprint"] == NUMERICS
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_router_gets_the_rendered_prompt_as_token_ids(stand: Stand) -> None:
    chat(stand)
    (request,) = stand.router.requests
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nred green blue<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(request.token_ids.ids) == tokenizer().encode(text)
    assert request.tokenizer_digest and request.output.final_only and request.sampling.temperature == 0


def test_unset_sampling_fields_stay_unset(stand: Stand) -> None:
    chat(stand, temperature=...)
    (request,) = stand.router.requests
    for name in ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty", "presence_penalty"):
        assert not request.sampling.HasField(name), name


def test_every_sampling_field_reaches_the_router(stand: Stand) -> None:
    chat(
        stand,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "7": 1.5},
        allowed_token_ids=[5, 7, 9],
        bad_words=["red"],
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[9],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=3,
        cache_salt="pepper",
        n=2,
        receipt=True,
    )
    (request,) = stand.router.requests
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.25, 7, 0.125, 2**64 - 1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(s.logit_bias) == {5: -100.0, 7: 1.5} and list(s.allowed_token_ids) == [5, 7, 9]
    assert [list(word.ids) for word in s.bad_words] == [tokenizer().encode("red"), tokenizer().encode(" red")]
    assert request.stop.min_tokens == 2 and list(request.stop.stop) == ["x"]
    assert list(request.stop.stop_token_ids) == [9] and request.stop.ignore_eos
    assert request.stop.include_stop_str_in_output and request.output.keep_special_tokens and request.output.receipt
    assert (request.priority, request.cache_salt, request.n) == (3, "pepper", 2)


def test_max_tokens_defaults_to_what_the_context_leaves(stand: Stand) -> None:
    chat(stand, max_tokens=..., stop=[" green"])
    (request,) = stand.router.requests
    assert request.stop.max_tokens == 2048 - len(request.token_ids.ids)


def test_a_stream_has_role_deltas_finish_usage_and_done(stand: Stand) -> None:
    plain = chat(stand)
    with stand.http.stream(
        "POST",
        PATH,
        json={
            "messages": ASK,
            "temperature": 0,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer)
    assert events[-1].data == "[DONE]"
    chunks = [event.json for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == plain["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_n_choices_are_streamed_apart(stand: Stand) -> None:
    body = {"messages": ASK, "temperature": 1, "seed": 3, "max_tokens": 6, "n": 3}
    plain = stand.post(PATH, body).json()
    with stand.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        chunks = [event.json for event in read_events(answer)[:-1]]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "length"
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == plain["choices"][index]["message"]["content"]


def test_logprobs_in_both_forms(stand: Stand) -> None:
    plain = chat(stand, logprobs=True, top_logprobs=3)["choices"][0]
    content = plain["logprobs"]["content"]
    assert len(content) == 8 and "".join(t["token"] for t in content) == plain["message"]["content"]
    assert all(len(t["top_logprobs"]) == 3 and bytes(t["bytes"]).decode() == t["token"] for t in content)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 8, "stream": True, "logprobs": True, "top_logprobs": 3}
    with stand.http.stream("POST", PATH, json=body) as answer:
        chunks = [event.json for event in read_events(answer)[:-1]]
    streamed = [t for c in chunks for t in ((c["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert streamed == content


def test_the_end_token_is_no_part_of_the_logprobs(stand: Stand) -> None:
    """Tokens of logprobs.content join to the text, so the token that ends it is not among them."""
    for stream in (False, True):
        body = {
            "messages": ASK,
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": True,
            "logit_bias": {"2": 100},
            "stream": stream,
        }
        if stream:
            with stand.http.stream("POST", PATH, json=body) as answer:
                chunks = [event.json for event in read_events(answer)[:-1]]
            assert not any((c["choices"][0]["logprobs"] or {}).get("content") for c in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            choice = stand.post(PATH, body).json()["choices"][0]
            assert choice["logprobs"]["content"] == [] and choice["finish_reason"] == "stop"


def test_prompt_logprobs_token_ids_and_receipt(stand: Stand) -> None:
    answer = chat(stand, prompt_logprobs=2, return_token_ids=True, receipt=True)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"][1]) in (2, 3)
    assert len(answer["choices"][0]["token_ids"]) == 8
    assert answer["receipt"]["numerics_id"] == NUMERICS


def test_structured_outputs_under_all_names(stand: Stand) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for given in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": json.dumps(schema)},
    ):
        text = chat(stand, max_tokens=60, **given)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(text)["a"], bool)
    options = ["north", "south"]
    for fields in ({"structured_outputs": {"choice": options}}, {"guided_choice": options}):
        assert chat(stand, **fields)["choices"][0]["message"]["content"] in ("north", "south")
    kinds = [request.structured.WhichOneof("kind") for request in stand.router.requests]
    assert kinds == ["json_schema"] * 3 + ["choice"] * 2


def test_the_schema_true_allows_anything(stand: Stand) -> None:
    chat(stand, guided_json=True)
    assert stand.router.requests[0].structured.json_schema == "{}"


def test_two_constraints_are_refused(stand: Stand) -> None:
    error = chat(stand, 400, guided_regex="a", guided_choice=["b"])["error"]
    assert "guided_regex" in error["message"] and "guided_choice" in error["message"]


def test_continuing_the_last_message(stand: Stand) -> None:
    talk = [*ASK, {"role": "assistant", "content": "The river was"}]
    chat(stand, messages=talk, continue_final_message=True)
    ids = list(stand.router.requests[0].token_ids.ids)
    assert tokenizer().decode(ids, skip_special=False).endswith("<|im_start|>assistant\nThe river was")
    echoed = chat(stand, messages=talk, continue_final_message=True, echo=True)
    assert echoed["choices"][0]["message"]["content"].startswith("The river was")
    assert chat(stand, 400, messages=talk, continue_final_message=True, add_generation_prompt=True)["error"]


def test_request_templates_need_a_flag(stand: Stand, make_stand: Any) -> None:
    assert chat(stand, 400, chat_template="{{ messages[0].content }}")["error"]["param"] == "chat_template"
    open_stand = make_stand(allow_request_templates=True)
    chat(open_stand, chat_template="{{ messages[0].content }} {{ word }}", chat_template_kwargs={"word": "hello"})
    assert tokenizer().decode(open_stand.router.requests[0].token_ids.ids) == "Be brief. hello"
    assert chat(open_stand, 400, chat_template="{{ broken")["error"]["param"] == "chat_template"


@pytest.mark.parametrize("field", ["audio", "web_search_options", "functions", "function_call", "verbosity"])
def test_what_cannot_be_honoured_is_refused_by_name(stand: Stand, field: str) -> None:
    error = chat(stand, 400, **{field: {"some": "thing"}})["error"]
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused(stand: Stand, part: str) -> None:
    error = chat(stand, 400, messages=[{"role": "user", "content": [{"type": part, part: {}}]}])["error"]
    assert part in error["message"] and error["param"].startswith("messages[0].content[0]")


def test_who_is_not_to_be_stored_is_not_learnt_from(stand: Stand) -> None:
    for value in (False, True, None):
        chat(stand, store=value)
    assert "store" in chat(stand, 400, store="no")["error"]["param"]
    body = {"prompt": "red", "max_tokens": 2}
    assert stand.post("/v1/completions", {**body, "store": False}).status_code == 200
    for value in (False, True):
        assert stand.post("/v1/responses", {"input": "red", "store": value}).json()["store"] is False
    assert [request.no_store for request in stand.router.requests] == [True, False, False, True, True, False]


def test_documented_fields_without_effect(stand: Stand) -> None:
    plain = chat(stand)
    same = chat(
        stand,
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "x"},
        user="someone",
        safety_identifier="s",
        nobody_knows_this=1,
    )
    assert same["choices"] == plain["choices"]
