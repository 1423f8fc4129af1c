"""POST /v1/completions: prompts of all forms, echo, logprobs, best_of, streams over several prompts."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.generation import CollectedChoice
from gateway.routes.completions import best_choices
from tandem.inference.v1 import inference_pb2 as pb
from tests.gateway.conftest import Stand
from tests.gateway.mock_router import tokenizer
from tests.gateway.sse import read_events

PATH = "/v1/completions"
FOX = "The quick brown fox jumps over the lazy dog."


def complete(stand: Stand, status: int = 200, **body: Any) -> Any:
    answer = stand.post(PATH, {"prompt": FOX, "temperature": 0, "max_tokens": 6, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(stand: Stand, **body: Any) -> list[Any]:
    sent = {"prompt": FOX, "temperature": 0, "max_tokens": 6, **body, "stream": True}
    with stand.http.stream("POST", PATH, json=sent) as answer:
        assert answer.status_code == 200
        events = read_events(answer)
    assert events[-1].data == "[DONE]"
    return [event.json for event in events[:-1]]


def test_shape_and_default_of_sixteen_tokens(stand: Stand) -> None:
    answer = stand.post(PATH, {"prompt": FOX}).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["finish_reason"] == "length"


def test_prompts_of_all_forms_are_one_generate_each_in_order(stand: Stand) -> None:
    ids = tokenizer().encode(FOX)
    one = complete(stand)["choices"][0]["text"]
    assert complete(stand, prompt=ids)["choices"][0]["text"] == one
    answer = complete(stand, prompt=[ids, tokenizer().encode("red green")], n=2, temperature=1, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = complete(stand, prompt="red green", n=2, temperature=1, seed=1)
    assert [c["text"] for c in answer["choices"][2:]] == [c["text"] for c in alone["choices"]]
    assert len(stand.router.requests) == 5
    texts = [c["choices"][0]["text"] for c in (complete(stand, prompt=p) for p in ("a b c", "d e f"))]
    assert [c["text"] for c in complete(stand, prompt=["a b c", "d e f"])["choices"]] == texts


def test_several_prompts_are_streamed_with_their_indices(stand: Stand) -> None:
    plain = complete(stand, prompt=["a b c", "d e f", "g h i"], n=2, temperature=1, seed=4)
    chunks = streamed(
        stand,
        prompt=["a b c", "d e f", "g h i"],
        n=2,
        temperature=1,
        seed=4,
        stream_options={"include_usage": True},
    )
    for index in range(6):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == plain["choices"][index]["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == plain["usage"]


@pytest.mark.parametrize("prompt", [FOX, "  two  spaces\n\tand a tab ", "naïve 漢字 😀 end"])
def test_echo_is_exact(stand: Stand, prompt: str) -> None:
    plain = complete(stand, prompt=prompt)["choices"][0]["text"]
    assert complete(stand, prompt=prompt, echo=True)["choices"][0]["text"] == prompt + plain
    assert "".join(c["choices"][0]["text"] for c in streamed(stand, prompt=prompt, echo=True)) == prompt + plain


def test_echo_with_zero_tokens_scores_the_prompt(stand: Stand) -> None:
    answer = complete(stand, max_tokens=0, echo=True, logprobs=1)
    ids = tokenizer().encode(FOX)
    scores = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == FOX and answer["usage"]["completion_tokens"] == 0
    assert "".join(scores["tokens"]) == FOX and scores["token_logprobs"][0] is None
    assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(ids)
    for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
        assert token in top and 1 <= len(top) <= 2
    assert complete(stand, 400, max_tokens=0)["error"]["param"] == "max_tokens"


def test_streamed_echo_with_logprobs_equals_the_plain_one(stand: Stand) -> None:
    plain = complete(stand, echo=True, logprobs=2)["choices"][0]["logprobs"]
    chunks = [c["choices"][0]["logprobs"] for c in streamed(stand, echo=True, logprobs=2)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for c in chunks for value in (c or {}).get(name, ())] == plain[name]


def test_offsets_count_characters(stand: Stand) -> None:
    prompt = "naïve 漢字 😀 end"
    choice = complete(stand, prompt=prompt, echo=True, logprobs=0, max_tokens=14)["choices"][0]
    scores = choice["logprobs"]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_prompt_logprobs_and_token_ids(stand: Stand) -> None:
    choice = complete(stand, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    ids = tokenizer().encode(FOX)
    assert choice["prompt_token_ids"] == ids and len(choice["prompt_logprobs"]) == len(ids)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])]["decoded_token"] == " quick"
    assert len(choice["token_ids"]) == 6


def test_best_of_returns_the_likeliest(stand: Stand) -> None:
    answer = complete(stand, best_of=3, n=1, temperature=1, seed=2)
    assert len(answer["choices"]) == 1 and answer["usage"]["completion_tokens"] == 18
    assert complete(stand, 400, best_of=1, n=2)["error"]["param"] == "best_of"
    assert complete(stand, 400, best_of=2, stream=True)["error"]["param"] == "best_of"
    low = CollectedChoice(scores=[pb.TokenLogprob(id=1, logprob=-3)])
    high = CollectedChoice(scores=[pb.TokenLogprob(id=1, logprob=-1), pb.TokenLogprob(id=1, logprob=-2)])
    assert best_choices([low, high], 1) == [high]


def test_truncation_keeps_the_end_of_the_prompt(stand: Stand) -> None:
    complete(stand, truncate_prompt_tokens=3)
    assert list(stand.router.requests[0].token_ids.ids) == tokenizer().encode(FOX)[-3:]
    complete(stand, prompt=[5] * 5000, truncate_prompt_tokens=-1)
    assert len(stand.router.requests[1].token_ids.ids) == 2048 - 6
    echoed = complete(stand, truncate_prompt_tokens=3, echo=True)["choices"][0]["text"]
    assert echoed.startswith(tokenizer().decode(tokenizer().encode(FOX)[-3:]))


def test_continuous_usage_counts_up(stand: Stand) -> None:
    chunks = streamed(stand, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 4


def test_suffix_is_refused_by_name(stand: Stand) -> None:
    assert complete(stand, 400, suffix="end")["error"]["param"] == "suffix"


def test_stop_strings_never_leak(stand: Stand) -> None:
    text = complete(stand, max_tokens=20)["choices"][0]["text"]
    stop = text[10:14]
    plain = complete(stand, max_tokens=20, stop=stop)["choices"][0]
    assert plain["text"] == text[: text.index(stop)] and plain["finish_reason"] == "stop"
    assert plain["stop_reason"] == stop
    chunks = streamed(stand, max_tokens=20, stop=[stop])
    assert "".join(c["choices"][0]["text"] for c in chunks) == plain["text"]


def test_a_stop_token_is_among_the_legacy_logprobs(stand: Stand) -> None:
    """lm-eval asks for one token and cuts one off the lists, whatever it was."""
    plain = complete(stand, max_tokens=1, echo=True, logprobs=1, logit_bias={"2": 100})["choices"][0]
    assert plain["finish_reason"] == "stop" and plain["text"] == FOX
    assert len(plain["logprobs"]["tokens"]) == len(tokenizer().encode(FOX)) + 1
    chunks = streamed(stand, max_tokens=4, logprobs=1, logit_bias={"2": 100})
    assert [t for c in chunks for t in (c["choices"][0]["logprobs"] or {}).get("tokens", ())] == ["<|im_end|>"]
