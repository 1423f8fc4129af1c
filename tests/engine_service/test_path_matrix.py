"""The engine over a real small model: whatever path a request takes, its tokens and logprobs keep their bits.

Chunk sizes × cached or not × preempted × drafts × batch mates × forked choices, with every KV slot that nobody may read
filled with NaN after each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_service.jobs import StepReport
from engine_service.policy import SchedulerConfig
from engine_service.speculation import Draft, NullSpeculation, SpecCandidate
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, SamplingParams, TokenScore
from tests.engine_service.fakes import BYTE_VOCAB
from tests.engine_service.harness import Harness

BLOCK = 16
OUTPUT = 24
KV_HEADS, HEAD_DIM = 2, 16
# Two prompts of four blocks fill TIGHT and their answers need more: whoever runs beside another is preempted.
ROOMY, TIGHT = 40, 8
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SEEDED = SamplingParams(temperature=1.0, seed=99, logprobs=2)
SHAPED = SamplingParams(
    temperature=0.8, top_k=30, top_p=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2
)


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


# Equal beginnings, one prompt of whole blocks, one of a single token.
PROMPTS = [[*tokens(0, 40), *tokens(i, 9)] for i in range(2)] + [tokens(7, 48), tokens(8, 1)]
CASES = list(itertools.product(range(len(PROMPTS)), (GREEDY, SEEDED, SHAPED)))


class RealHarness(Harness):
    """A harness that keeps scores, and poisons real KV."""

    def __init__(self, runner: Runner, blocks: int, **options: Any) -> None:
        config = SchedulerConfig(
            options.get("seqs", 6), options.get("budget", 512), options.get("chunk", 512), "fcfs", 10.0
        )
        super().__init__(runner, config, options.get("speculation"), options.get("caching", True))  # type: ignore[arg-type]
        self.pool.__init__(blocks, BLOCK, caching=options.get("caching", True))  # type: ignore[misc]
        self.scores: dict[tuple[int, int], list[TokenScore]] = {}
        self.prompt_scores: dict[int, list[TokenScore]] = {}
        self.tensors = _kv_tensors(runner)

    def step(self) -> bool:
        worked = self.loop.step()
        self.scheduler.check()
        used = {c.sequence.id: (c.blocks, c.num_computed) for c in self.scheduler.running}
        for block in range(self.pool.num_blocks):
            if self.pool.is_registered(block):
                continue
            filled = max(
                (min(BLOCK, n - blocks.index(block) * BLOCK) for blocks, n in used.values() if block in blocks),
                default=0,
            )
            for tensor in self.tensors:
                _poison(tensor, block, max(0, filled))
        return worked

    def _report(self, report: StepReport) -> None:
        super()._report(report)
        for job in report.jobs:
            if job.prompt_scores is not None:
                self.prompt_scores[job.request.id] = list(job.prompt_scores)
            for update in job.updates:
                self.scores.setdefault((job.request.id, update.choice), []).extend(update.scores or [])

    def outcome(self, request: int, choice: int = 0) -> tuple[list[int], list[TokenScore]]:
        return self.results[request].outputs[choice], self.scores[request, choice]


def _kv_tensors(runner: Runner) -> list[torch.Tensor]:
    """Views of K and V of all layers in types that can hold NaN: [num_blocks, num_kv_heads, BLOCK, ...], or
    [num_blocks, num_kv_heads, BLOCK / 2, 2, head_dim] where two slots lie in pairs."""
    cache = getattr(runner._kv, "_cache", runner._kv)  # type: ignore[attr-defined]
    if isinstance(cache.keys[0], torch.Tensor):
        return [*cache.keys, *cache.values]
    # The kernels' layouts: bf16 lies in pairs, of dimensions in K and of slots in V; keys of 16 slots lie side by side.
    assert all(array.dtype == np.uint16 for array in (*cache.keys, *cache.values))
    found = []
    for array in cache.keys:
        keys = torch.from_numpy(array).view(torch.bfloat16).view(len(array), KV_HEADS, HEAD_DIM // 2, BLOCK, 2)
        found.append(keys.permute(0, 1, 3, 2, 4))
    for array in cache.values:
        values = torch.from_numpy(array).view(torch.bfloat16).view(len(array), KV_HEADS, BLOCK // 2, HEAD_DIM, 2)
        found.append(values.permute(0, 1, 2, 4, 3))
    return found


def _poison(tensor: torch.Tensor, block: int, start: int) -> None:
    """Fills the slots of a block from `start` on with NaN."""
    if tensor.shape[2] == BLOCK:
        tensor[block, :, start:] = float("nan")
        return
    tensor[block, :, (start + 1) // 2 :] = float("nan")
    if start % 2:
        tensor[block, :, start // 2, 1] = float("nan")


class Recalling(NullSpeculation):
    """Drafts what earlier runs said, but errs at every fourth token."""

    def __init__(self, known: dict[tuple[int, int, int], list[int]]) -> None:
        self.known = known
        self.accepted = 0

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        drafts = {}
        for candidate in candidates:
            sequence = candidate.sequence
            key = (hash(tuple(sequence.token_ids[: sequence.prompt_len])), hash(sequence.params), sequence.choice)
            rest = self.known.get(key, [])[sequence.output_len :][: min(5, candidate.max_drafts)]
            ids = [(t + 1) % BYTE_VOCAB if (sequence.output_len + i) % 4 == 3 else t for i, t in enumerate(rest)]
            if ids:
                drafts[sequence.id] = Draft(tuple(ids), "recall")
        return drafts

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        self.accepted += accepted


@pytest.fixture(scope="module", params=["torch-exact", "native-fast"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A random Llama over bytes, on the torch path and on the compiled one with its narrow weights and KV."""
    from transformers import LlamaConfig, LlamaForCausalLM

    kernels, numerics = request.param.split("-")
    if kernels == "native":
        cpu = pytest.importorskip("kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.reason())
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=BYTE_VOCAB,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    loaded = load_runner(
        RunnerSettings(path, numerics=numerics, kernels=kernels, threads=1, block_size=BLOCK, kv_cache_bytes=4 << 20)
    )
    assert loaded.spec.kernel_path.startswith("cpu/")
    assert loaded.spec.kernel_path.endswith("torch") == (kernels == "torch"), "no other path takes over in silence"
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def alone(runner: Runner) -> dict[int, tuple[list[int], list[TokenScore]]]:
    """Every case by itself: nobody else, nothing cached, one piece, no drafts."""
    found = {}
    for index, (prompt, params) in enumerate(CASES):
        h = RealHarness(runner, ROOMY, caching=False)
        request = h.add(PROMPTS[prompt], OUTPUT, params=params)
        h.finish()
        found[index] = h.outcome(request)
    return found


def known(alone: dict[int, tuple[list[int], list[TokenScore]]]) -> dict[tuple[int, int, int], list[int]]:
    return {
        (hash(tuple(PROMPTS[prompt])), hash(params), 0): alone[index][0] for index, (prompt, params) in enumerate(CASES)
    }


def run_all(h: RealHarness, spread: int) -> dict[int, int]:
    """Adds all cases, `spread` steps apart, and finishes. Returns request ids by case."""
    requests = {}
    for index, (prompt, params) in enumerate(CASES):
        requests[index] = h.add(PROMPTS[prompt], OUTPUT, params=params)
        for _ in range(spread):
            h.step()
    h.finish()
    return requests


# Chunk, cached, drafts, blocks. The rest of the product is left to the long run.
PATHS = list(itertools.product([512, 24, 7], [False, True], [False, True], [ROOMY, TIGHT]))
SOME = [
    (512, False, False, ROOMY),
    (512, True, True, TIGHT),
    (24, True, False, TIGHT),
    (7, False, True, ROOMY),
]


@pytest.mark.parametrize(
    ("chunk", "caching", "drafts", "blocks"),
    [pytest.param(*path, marks=() if path in SOME else pytest.mark.slow) for path in PATHS],
)
def test_every_path_gives_the_same_bits(
    runner: Runner,
    alone: dict[int, tuple[list[int], list[TokenScore]]],
    chunk: int,
    caching: bool,
    drafts: bool,
    blocks: int,
) -> None:
    speculation = Recalling(known(alone)) if drafts else NullSpeculation()
    budget = 512 if chunk == 512 else max(8, 2 * chunk)
    h = RealHarness(runner, blocks, chunk=chunk, budget=budget, caching=caching, speculation=speculation)
    requests = run_all(h, spread=0 if blocks == TIGHT else 1)
    for index, request in requests.items():
        assert h.outcome(request) == alone[index], CASES[index]
    if drafts:
        assert isinstance(speculation, Recalling) and speculation.accepted > 0
    if blocks == TIGHT and chunk != 7:  # in the smallest chunks prompts come too slowly to crowd the pool
        assert any(h.requests[request].preemptions for request in requests.values())
    if caching and blocks == ROOMY:
        assert any(h.requests[request].cached_tokens for request in requests.values())


def test_forked_choices_equal_choices_alone(runner: Runner) -> None:
    outcomes = []
    for mates, chunk in ((0, 512), (3, 20)):
        h = RealHarness(runner, ROOMY, chunk=chunk, budget=512 if chunk == 512 else 64, seqs=8)
        for mate in range(mates):
            h.add(tokens(50 + mate, 30), 20)
        request = h.add(PROMPTS[0], OUTPUT, n=3, params=SEEDED)
        h.finish()
        outcomes.append([h.outcome(request, choice) for choice in range(3)])
    assert outcomes[0] == outcomes[1]
    assert len({tuple(ids) for ids, _scores in outcomes[0]}) == 3


def test_resumed_output_is_the_rest_of_the_whole(
    runner: Runner, alone: dict[int, tuple[list[int], list[TokenScore]]]
) -> None:
    for index, (prompt, params) in enumerate(CASES[:3]):
        ids, scores = alone[index]
        h = RealHarness(runner, ROOMY)
        request = h.add(PROMPTS[prompt], OUTPUT, params=params, emitted={0: ids[:5]})
        h.finish()
        assert h.outcome(request) == (ids[5:], scores[5:])


def test_prompt_scores_do_not_depend_on_chunks_or_cache(runner: Runner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0)
    found = []
    for chunk, warm in ((512, False), (13, False), (5, True)):
        h = RealHarness(runner, ROOMY, chunk=chunk, budget=512 if chunk == 512 else 16)
        if warm:
            h.add(PROMPTS[2], 2)
            h.finish()
            h.add(tokens(60, 20), 30)
        request = h.add(PROMPTS[2], 2, params=params, score_prompt=True)
        h.finish()
        found.append(h.prompt_scores[request])
    assert [score.id for score in found[0]] == PROMPTS[2][1:]
    assert found[0] == found[1] == found[2]
