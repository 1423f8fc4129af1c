"""Log-likelihoods as lm-eval's local-completions asks for them (echo + logprobs) equal transformers' in fp32."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import Stack

CONTEXTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, there was a small",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "def add(a, b):\n    return",
]
ENDINGS = [
    " Paris.",
    " 100 degrees.",
    " village near the sea.",
    " 9, 10, 11",
    " a + b",
    " London and Rome",
    " because nobody knew",
    " naïve 漢字",
    "\n\nThe end.",
    " zzz qqq",
]


@pytest.fixture(scope="module")
def exact_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    stack = Stack(tmp_path_factory.mktemp("t"), port, "--numerics", "exact", "--draft", "none")
    yield stack.wait_ready()
    stack.stop()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_continuations_equal_transformers(exact_stack: Stack) -> None:
    import torch

    from tandem.models.store import resolve
    from tandem.tokenizer import Tokenizer, load_bundle
    from tests.lm.reference import llama_from_gguf

    path: Path = resolve("smollm2-135m-instruct").path
    tokenizer, model = Tokenizer(load_bundle(path)), llama_from_gguf(path)
    cases = [(context, ending) for context in CONTEXTS for ending in ENDINGS]
    random.Random(0).shuffle(cases)
    for context, ending in cases:
        ids = tokenizer.encode(context + ending)
        start = len(tokenizer.encode(context))
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
        answer = httpx.post(exact_stack.url + "/v1/completions", json=body, timeout=120, trust_env=False)
        got = answer.json()["choices"][0]["logprobs"]
        # lm-eval drops the generated token and takes the continuation's part.
        values, tops = got["token_logprobs"][start:-1], got["top_logprobs"][start:-1]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].float()
        reference = torch.log_softmax(logits, dim=-1)
        wanted = [float(reference[at - 1, ids[at]]) for at in range(start, len(ids))]
        assert len(values) == len(wanted)
        assert values == pytest.approx(wanted, abs=1e-3), (context, ending)
        greedy = [int(reference[at - 1].argmax()) == ids[at] for at in range(start, len(ids))]
        told = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
        assert told == greedy, (context, ending)
