"""The default model against transformers in fp32, with weights unpacked by the tests' own code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice
from tests.lm.driver import Driver, Job
from tests.lm.reference import llama_from_gguf

# fp32 on both sides; sums are taken in another order.
LOGPROB_TOLERANCE = 1e-3
# Where transformers' two best logits are closer than this, either is right.
TIE = 1e-3


@pytest.fixture(scope="module")
def reference(smollm_path: Path) -> torch.nn.Module:
    return llama_from_gguf(smollm_path)


def prompts(count: int) -> list[list[int]]:
    """Token ids in the model's chat shape (<|im_start|> user … <|im_end|>), contents drawn by a fixed seed."""
    rng = np.random.default_rng(20)
    found = []
    for index in range(count):
        body = rng.integers(200, 20_000, size=4 + 3 * index).tolist()
        found.append([1, 4093, 198, *body, 2, 198, 1, 520, 9531, 198])
    return found


def check_greedy(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> None:
    """Each output token is transformers' argmax after the tokens before it (so greedy outputs are equal)."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best = logits.argmax(-1)
    for step, token in enumerate(output):
        if best[step] != token:
            gap = float(logits[step, best[step]] - logits[step, token])
            assert gap < TIE, f"step {step}: {token}, but transformers prefers {int(best[step])} by {gap}"


def test_greedy_tokens_alone_and_in_a_batch(smollm: Runner, reference: torch.nn.Module) -> None:
    params = SamplingParams(temperature=0.0)
    batch = [Job(prompt, params, 12) for prompt in prompts(6)]
    Driver(smollm).run(batch)
    for job in batch:
        check_greedy(reference, job.prompt, job.output)
    alone = Job(batch[3].prompt, params, 12)
    Driver(smollm).run([alone])
    assert alone.output == batch[3].output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_greedy_tokens_of_twenty_prompts(smollm_path: Path, reference: torch.nn.Module) -> None:
    """On the kernels that serve this machine, with exact numerics."""
    runner = load_runner(RunnerSettings(smollm_path, numerics="exact", threads=2, kv_cache_bytes=256 << 20))
    params = SamplingParams(temperature=0.0, logprobs=0)
    batch = [Job(prompt, params, 64) for prompt in prompts(20)]
    Driver(runner).run(batch)
    for job in batch:
        check_greedy(reference, job.prompt, job.output)
        alone = Job(job.prompt, params, 64)
        Driver(runner).run([alone])
        assert alone.output == job.output and alone.scores == job.scores


def test_teacher_forced_logprobs(smollm: Runner, reference: torch.nn.Module) -> None:
    prompt = prompts(20)[19]
    sequence = Sequence(1, 0, SamplingParams(temperature=0.0, prompt_logprobs=3), prompt, len(prompt))
    table = Driver(smollm).blocks(len(prompt))
    output = smollm.execute([Slice(sequence, table, 0, len(prompt), sample=False, score_prompt=True)])[0]
    with torch.no_grad():
        logprobs = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    assert output.prompt_scores is not None and len(output.prompt_scores) == len(prompt) - 1
    for position, score in enumerate(output.prompt_scores):
        row = logprobs[position]
        assert score.id == prompt[position + 1]
        assert abs(score.logprob - float(row[score.id])) < LOGPROB_TOLERANCE
        assert score.rank == 1 + int((row > row[score.id]).sum()) or abs(score.logprob) > 5
        top = row.topk(3)
        assert np.allclose(score.top_logprobs, top.values.numpy(), atol=LOGPROB_TOLERANCE)
