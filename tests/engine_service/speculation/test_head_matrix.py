"""Heads on a real small model: whatever they say and whatever the request asks, tokens and logprobs keep their bits."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from engine_service.speculation import NullSpeculation, SpeculationController
from engine_service.speculation.controller import DraftSpeculation
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.proposers.head import HeadProposer
from tandem.lm.types import Runner, SamplingParams, Sequence, TokenScore
from tests.engine_service.fakes import BYTE_VOCAB
from tests.engine_service.server import Answer, ask, serve
from tests.engine_service.test_path_matrix import (  # noqa: F401
    CASES,
    OUTPUT,
    PROMPTS,
    ROOMY,
    SEEDED,
    TIGHT,
    RealHarness,
    alone,
    known,
    run_all,
    runner,
    tokens,
)
from tests.heads import Oracle, eager, random_head

Alone = dict[int, tuple[list[int], list[TokenScore]]]
KINDS = ("random", "right", "wrong")


def speculation_of(kind: str, runner: Runner, alone: Alone) -> DraftSpeculation:  # noqa: F811
    if kind == "random":
        return eager(HeadProposer(random_head(runner.spec), runner), BYTE_VOCAB)
    outputs = known(alone)

    def rest(sequence: Sequence) -> list[int]:
        key = (hash(tuple(sequence.token_ids[: sequence.prompt_len])), hash(sequence.params), sequence.choice)
        return outputs[key][sequence.output_len :]

    return eager(Oracle(rest, BYTE_VOCAB, right=kind == "right"), BYTE_VOCAB)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "caching", "blocks"), [(512, True, TIGHT), (7, False, ROOMY)])
def test_every_path_gives_the_same_bits(
    runner: Runner,  # noqa: F811
    alone: Alone,  # noqa: F811
    kind: str,
    chunk: int,
    caching: bool,
    blocks: int,
) -> None:
    """Chunks, cached prefixes, preemption and batch mates, with sampling of every kind."""
    speculation = speculation_of(kind, runner, alone)
    budget = 512 if chunk == 512 else 14
    h = RealHarness(runner, blocks, chunk=chunk, budget=budget, caching=caching, speculation=speculation)
    requests = run_all(h, spread=0 if blocks == TIGHT else 1)
    for index, request in requests.items():
        assert h.outcome(request) == alone[index], CASES[index]
    stats = speculation.stats
    assert stats.errors == 0 and stats.proposed > 50 and set(stats.proposers) == {"head"}
    if kind == "right":
        assert stats.accepted == stats.proposed
    if kind == "wrong":
        assert stats.accepted == 0
    if blocks == TIGHT:
        assert any(h.requests[request].preemptions for request in requests.values())


def test_the_head_gets_the_state_that_gave_the_last_token(runner: Runner, alone: Alone) -> None:  # noqa: F811
    """Also after accepted and rejected drafts: it is that of a pass over the committed tokens without any draft."""
    index = 4
    prompt, params = CASES[index]
    output = alone[index][0]
    rest = [output[i] if i % 3 else (output[i] + 1) % BYTE_VOCAB for i in range(len(output))]
    oracle = Oracle(lambda sequence: rest[sequence.output_len :], BYTE_VOCAB)
    lengths: list[int] = []
    draft = oracle.draft

    def noting(runs: Any) -> None:
        lengths.extend(run.sequence.output_len for run in runs)
        draft(runs)

    oracle.draft = noting  # type: ignore[method-assign]
    speculation = eager(oracle, BYTE_VOCAB)
    h = RealHarness(runner, ROOMY, speculation=speculation, chunk=20, budget=32)
    h.add(PROMPTS[prompt], OUTPUT, params=params)
    h.finish()
    assert 0 < speculation.stats.accepted < speculation.stats.proposed
    for length, hidden in zip(lengths, oracle.hidden, strict=True):
        # The last token is the one that the state gave: it is not in the pass.
        expected = runner.embed([[*PROMPTS[prompt], *output[: length - 1]]], "last", normalize=False)[0]
        assert np.array_equal(hidden, expected), length


def test_forked_choices_keep_their_own_states(runner: Runner) -> None:  # noqa: F811
    outcomes = []
    for drafting in (False, True):
        head = HeadProposer(random_head(runner.spec), runner)
        speculation: SpeculationController = eager(head, BYTE_VOCAB) if drafting else NullSpeculation()
        h = RealHarness(runner, ROOMY, chunk=20, budget=64, seqs=8, speculation=speculation)
        h.add(tokens(50, 30), 20)
        request = h.add(PROMPTS[0], OUTPUT, n=3, params=SEEDED)
        h.finish()
        outcomes.append([h.outcome(request, choice) for choice in range(3)])
    assert outcomes[0] == outcomes[1]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 999}}, "required": ["a"]}
SAMPLED = pb.SamplingParams(temperature=1.0, seed=5)
REQUESTS = {
    "greedy": {},
    "sampled": {"sampling": SAMPLED},
    "truncated": {"sampling": pb.SamplingParams(temperature=0.8, seed=7, top_k=20, top_p=0.9, min_p=0.01)},
    "penalties": {
        "sampling": pb.SamplingParams(
            temperature=1.0, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4
        )
    },
    "bias": {"sampling": pb.SamplingParams(temperature=0.7, seed=8, logit_bias={65: 4.0, 66: -100.0})},
    "grammar": {"structured": pb.StructuredOutput(json_schema=json.dumps(SCHEMA)), "sampling": SAMPLED},
    "two choices": {"n": 2, "sampling": SAMPLED},
    "stop string": {"stop": pb.StopConditions(max_tokens=40, stop=["a", "e", "1"]), "sampling": SAMPLED},
    "min tokens": {
        "stop": pb.StopConditions(max_tokens=30, min_tokens=12, stop_token_ids=list(range(200))),
        "sampling": SAMPLED,
    },
}


def build(fields: dict[str, Any]) -> pb.GenerateRequest:
    shared = {"stop": pb.StopConditions(max_tokens=30), "output": pb.OutputOptions(logprobs=2, receipt=True)}
    return ask("What is", **{**shared, **fields})


def seen(answer: Answer) -> list[object]:
    """All that a client gets of tokens: ids, text, logprobs, ends."""
    answer.check()
    choices = sorted({event.finished.choice for event in answer.events if event.HasField("finished")})
    return [
        (
            answer.ids(choice),
            answer.text(choice),
            [score.SerializeToString(deterministic=True) for d in answer.deltas(choice) for score in d.logprobs],
            answer.finished(choice).SerializeToString(deterministic=True),
        )
        for choice in choices
    ]


async def answers(runner: Runner, speculation: SpeculationController | None) -> dict[str, Answer]:  # noqa: F811
    runner.gate = threading.Event()  # type: ignore[attr-defined]
    close, runner.close = runner.close, lambda: None  # type: ignore[method-assign]
    try:
        async with serve(runner, speculation) as server:  # type: ignore[arg-type]
            return {name: await server.generate(build(fields)) for name, fields in REQUESTS.items()}
    finally:
        runner.close = close  # type: ignore[method-assign]


async def test_a_client_sees_no_difference(runner: Runner) -> None:  # noqa: F811
    """Penalties, bias, grammar, choices, stop strings and min_tokens, over the real server."""
    plain = {name: seen(answer) for name, answer in (await answers(runner, None)).items()}
    assert plain["grammar"][0][1].startswith("{"), plain["grammar"]  # type: ignore[index]
    assert len(plain["min tokens"][0][0]) >= 12  # type: ignore[index]
    for seed in range(2):
        head = HeadProposer(random_head(runner.spec, seed=seed), runner)
        speculation = eager(head, BYTE_VOCAB)
        found = await answers(runner, speculation)
        assert {name: seen(answer) for name, answer in found.items()} == plain
        assert speculation.stats.proposed > 50 and speculation.stats.errors == 0

    by_prompt: dict[int, list[int]] = {}

    def rest(sequence: Sequence) -> list[int]:
        return by_prompt[sequence.choice][sequence.output_len :]

    for name in ("greedy", "penalties", "stop string", "two choices"):
        by_prompt.update({choice: ids for choice, (ids, *_) in enumerate(plain[name])})  # type: ignore[misc]
        speculation = eager(Oracle(rest, BYTE_VOCAB), BYTE_VOCAB)
        runner.gate = threading.Event()  # type: ignore[attr-defined]
        close, runner.close = runner.close, lambda: None  # type: ignore[method-assign]
        async with serve(runner, speculation) as server:  # type: ignore[arg-type]
            answer = await server.generate(build(REQUESTS[name]))
        runner.close = close  # type: ignore[method-assign]
        assert seen(answer) == plain[name]
        receipt = answer.usage.receipt
        assert receipt.drafts_accepted == receipt.drafts_proposed or name == "stop string"
        if len(by_prompt[0]) > 4:
            assert receipt.accepted_by_proposer["head"] == receipt.drafts_accepted > 0


def test_rejection_runs_with_a_heads_distributions(runner: Runner) -> None:  # noqa: F811
    """Outputs may differ there; they are reproducible, and greedy ones are kept while equal."""
    outcomes = []
    for _ in range(2):
        speculation = eager(HeadProposer(random_head(runner.spec), runner), BYTE_VOCAB, rejection=True)
        h = RealHarness(runner, ROOMY, chunk=512, speculation=speculation)
        greedy = h.add(PROMPTS[0], OUTPUT, params=SamplingParams(temperature=0.0, logprobs=2))
        sampled = h.add(PROMPTS[1], OUTPUT, params=SEEDED)
        h.finish()
        assert speculation.stats.errors == 0 and speculation.stats.proposed > 20
        outcomes.append((h.outcome(greedy), h.outcome(sampled)))
    assert outcomes[0] == outcomes[1]
    h = RealHarness(runner, ROOMY, chunk=512)
    request = h.add(PROMPTS[0], OUTPUT, params=SamplingParams(temperature=0.0, logprobs=2))
    h.finish()
    assert outcomes[0][0] == h.outcome(request)
