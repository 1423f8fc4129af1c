"""The fast numerics of the default model against exact ones, on a text that every checkout has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels import cpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not cpu.available(), reason="CPU kernels are not built")]
ROOT = Path(__file__).parents[3]


def prompt_scores(numerics: str, kv_dtype: str, tokens: list[int], model: Path) -> tuple[float, np.ndarray]:
    """Perplexity of tokens, and the most likely id at each position."""
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.lm.types import SamplingParams, Sequence, Slice

    settings = RunnerSettings(
        model_path=model, numerics=numerics, kv_dtype=kv_dtype, kernels="native", kv_cache_bytes=256 << 20
    )
    runner = load_runner(settings)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    sequence = Sequence(1, 0, params, tokens, len(tokens))
    table = list(range(-(-len(tokens) // runner.spec.block_size)))
    output = runner.execute([Slice(sequence, table, 0, len(tokens), score_prompt=True)])[0]
    runner.close()
    scores = output.prompt_scores
    assert scores is not None and len(scores) == len(tokens) - 1
    return float(np.exp(-np.mean([s.logprob for s in scores]))), np.asarray([s.top_ids[0] for s in scores])


@pytest.mark.timeout(600)
def test_fast_numerics_hold_perplexity_and_top_choice() -> None:
    """Within 1% of exact perplexity, top-1 agreement of at least 95%, with bf16 and with int8 KV."""
    from tandem.models.store import resolve
    from tandem.tokenizer import Tokenizer, load_bundle

    path = resolve("smollm2-135m-instruct").path
    tokens = Tokenizer(load_bundle(path)).encode((ROOT / "LICENSE").read_text())[:1024]
    exact, best = prompt_scores("exact", "float32", tokens, path)
    for kv_dtype in ("bfloat16", "int8"):
        perplexity, chosen = prompt_scores("fast", kv_dtype, tokens, path)
        print(f"{kv_dtype} KV: perplexity {perplexity:.3f}, exact {exact:.3f}, top-1 {(chosen == best).mean():.2%}")
        assert abs(perplexity / exact - 1) < 0.01
        assert (chosen == best).mean() >= 0.95
