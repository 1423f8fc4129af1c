"""The engine's step loop over a two-layer model: Triton kernels in the interpreter against plain torch, token by
token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine_service.policy import SchedulerConfig
from engine_service.speculation import Draft, NullSpeculation, SpecCandidate
from tandem.lm.decode_graphs import DecodeGraphs
from tandem.lm.models.triton_model import TritonModel
from tandem.lm.runner import ModelRunner, load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import SamplingParams
from tests.engine_service.harness import Harness

VOCAB = 200
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=2**63 + 5, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.8, seed=7, top_k=30, repetition_penalty=1.3, frequency_penalty=0.3, min_tokens=3),
]
LENGTH = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 3 query heads per KV head, vocabulary 200."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def runner_of(path: Path, kernels: str, **settings: Any) -> ModelRunner:
    options = {"numerics": "exact", "kernels": kernels, "threads": 1, "kv_cache_bytes": 1 << 20} | settings
    return cast(ModelRunner, load_runner(RunnerSettings(path, **options)))


class RealHarness(Harness):
    """The harness without the fake runner's checks."""

    def step(self) -> bool:
        worked = self.loop.step()
        self.scheduler.check()
        return worked


class KnownAnswers(NullSpeculation):
    """Proposes the known answers of sequences, the second of them spoilt."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self._answers = list(zip(prompts, answers, strict=True))
        self.accepted = 0

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        drafts = {}
        for candidate in candidates:
            tokens = candidate.sequence.token_ids
            for prompt, answer in self._answers:
                if tokens[: len(prompt)] == prompt and len(tokens) > len(prompt):
                    ahead = answer[len(tokens) - len(prompt) :][:2]
                    ids = (ahead[0], (ahead[1] + 1) % VOCAB) if len(ahead) == 2 else tuple(ahead)
                    drafts[candidate.sequence.id] = Draft(ids, "known")
        return drafts

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        self.accepted += accepted


def generate(
    runner: ModelRunner, prompts: list[list[int]], speculation: NullSpeculation | None = None
) -> list[list[int]]:
    """Runs prompts × SAMPLINGS through the step loop, in chunks and with prefix caching."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=16)
    harness = RealHarness(cast(Any, runner), config, speculation)
    found = [harness.add(prompt, LENGTH, params=params) for prompt, params in zip(prompts, SAMPLINGS, strict=True)]
    harness.finish()
    return [harness.results[request].outputs[0] for request in found]


PROMPTS = [list(range(2, 39)), [7, 8, 9], list(range(2, 20))]


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    """What the plain torch path writes."""
    found = generate(runner_of(checkpoint, "torch"), PROMPTS)
    assert all(len(output) == LENGTH for output in found)
    return found


@pytest.fixture(scope="module")
def triton_runner(checkpoint: Path) -> ModelRunner:
    return runner_of(checkpoint, "triton")


@pytest.mark.slow
def test_tokens_equal_the_cpu_path(triton_runner: ModelRunner, wanted: list[list[int]]) -> None:
    assert triton_runner.spec.kernel_path == "interpreter/triton" and triton_runner.spec.batch_invariant
    assert generate(triton_runner, PROMPTS) == wanted


def test_tokens_equal_under_verification(triton_runner: ModelRunner, wanted: list[list[int]]) -> None:
    speculation = KnownAnswers(PROMPTS, wanted)
    assert generate(triton_runner, PROMPTS, speculation) == wanted
    assert speculation.accepted >= 2


@pytest.mark.slow
def test_captured_steps_equal_eager_ones(checkpoint: Path, wanted: list[list[int]]) -> None:
    """A stand-in for capture replays the step on its static inputs, as a graph does: buckets, padding and copies
    count.
    """
    runner = runner_of(checkpoint, "triton")
    model = cast(TritonModel, runner._model)
    replayed = 0

    def capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()

        def replay() -> torch.Tensor:
            nonlocal replayed
            replayed += 1
            return step()

        return replay

    model.graphs = DecodeGraphs(model.step_logits, capture, 512, patience=100)
    assert generate(runner, PROMPTS) == wanted
    assert replayed == 0 and not model.graphs.captured
    # What was wanted is captured in idle gaps, one bucket at a time.
    while runner.idle():
        pass
    assert (4, 512) in model.graphs.captured
    assert generate(runner, PROMPTS) == wanted
    assert replayed >= 1
