"""A draft head: its file, its arithmetic on both paths, what it drafts, and the hidden states that it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from tandem.lm import noise
from tandem.lm.batch import build_batch
from tandem.lm.proposers import head as head_module
from tandem.lm.proposers.head import CLAIMS, HeadProposer, HeadRun, Pursuit
from tandem.lm.proposers.head_file import HeadError, HeadFile, load_head, quantize, save_head
from tandem.lm.proposers.head_net import CompiledNet, TorchNet
from tandem.lm.sampler import Sampler
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice
from tests.heads import random_head
from tests.lm.test_families import load, make

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_ggufs(kind: str) -> None:
    weight = np.random.default_rng(1).standard_normal((24, 96)).astype(np.float32)
    weight[3, 32:64] = 0.0
    matrix = quantize(weight, kind)
    theirs = dequantize(matrix.data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(matrix.dequantize(), theirs.reshape(24, 96))
    assert np.abs(theirs - weight).max() < (0.02 if kind == "Q8_0" else 0.4)


@pytest.mark.parametrize(("kind", "slack"), [("F32", 0.0), ("F16", 2e-3), ("BF16", 1.6e-2)])
def test_plain_forms(kind: str, slack: float) -> None:
    weight = np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)
    assert np.abs(quantize(weight, kind).dequantize() - weight).max() <= slack


def test_sizes_and_forms_that_do_not_exist() -> None:
    with pytest.raises(HeadError, match="Q3_K"):
        quantize(np.zeros((4, 32), np.float32), "Q3_K")
    with pytest.raises(HeadError, match="33"):
        quantize(np.zeros((4, 33), np.float32), "Q8_0")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tmp_path_factory.mktemp("target")
    make("llama", path)
    return load(path)


def same(a: HeadFile, b: HeadFile) -> bool:
    names = ("w_in", "w_gate", "w_up", "w_down", "w_out")
    matrices = all(np.array_equal(getattr(a, n).dequantize(), getattr(b, n).dequantize()) for n in names)
    arrays = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("g_s", "g_e", "g_o", "ids"))
    return matrices and arrays and (a.target_digest, a.eps, a.card) == (b.target_digest, b.eps, b.card)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_file_comes_back_as_it_was(kind: str, target: Runner, tmp_path: Path) -> None:
    head = replace(random_head(target.spec, kind, vocab=70), card={"acceptance": [0.6, 0.5]}, eps=1e-5)
    save_head(tmp_path / "h", head)
    assert same(load_head(tmp_path / "h"), head)
    assert [path.name for path in tmp_path.iterdir()] == ["h"]


def header(change: Callable[[dict], None]) -> Callable[[bytes], bytes]:  # type: ignore[type-arg]
    def apply(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return apply


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "no safetensors file"),
    "truncated": (lambda raw: raw[:-100], "no safetensors file"),
    "text": (lambda raw: b"not a head at all", "no safetensors file"),
    "another format": (header(lambda h: h["__metadata__"].update(format="7")), "format is '7'"),
    "no metadata": (header(lambda h: h.pop("__metadata__")), "format is None"),
    "no digest": (header(lambda h: h["__metadata__"].pop("target_digest")), "target_digest"),
    "size that is no number": (header(lambda h: h["__metadata__"].update(hidden="x")), "cannot be read"),
    "other sizes": (header(lambda h: h["__metadata__"].update(intermediate="96")), "metadata says"),
    "unknown form": (header(lambda h: h["__metadata__"].update({"type.w_up": "Q9"})), "type.w_up is 'Q9'"),
    "form of other size": (header(lambda h: h["__metadata__"].update({"type.w_up": "Q8_0"})), "w_up"),
    "small vocabulary": (header(lambda h: h["__metadata__"].update(target_vocab="3")), "less than 3"),
    "eps": (header(lambda h: h["__metadata__"].update(eps="0")), "eps is 0"),
    "missing matrix": (header(lambda h: h.update(w_other=h.pop("w_down"))), "w_down are missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_what_is_wrong(name: str, target: Runner, tmp_path: Path) -> None:
    change, reason = BROKEN[name]
    save_head(tmp_path / "h", random_head(target.spec))
    (tmp_path / "h").write_bytes(change((tmp_path / "h").read_bytes()))
    with pytest.raises(HeadError, match=reason) as caught:
        load_head(tmp_path / "h")
    assert str(tmp_path / "h") in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(tmp_path / "h")


def test_ids_ascend(target: Runner) -> None:
    head = random_head(target.spec)
    with pytest.raises(HeadError, match="ascend"):
        replace(head, ids=head.ids[::-1].copy())


def test_another_models_head_is_refused(target: Runner) -> None:
    head = random_head(target.spec)
    with pytest.raises(HeadError, match="abc"):
        HeadProposer(replace(head, target_digest="abc"), target)
    with pytest.raises(HeadError, match="hidden size"):
        HeadProposer(random_head(replace(target.spec, hidden_size=32)), target)


def reference(head: HeadFile, hidden: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """Logits fp64 [tokens, vocab] of a chain of embeddings [tokens, hidden], as the contract has them."""
    w = {name: getattr(head, name).dequantize().astype(np.float64) for name in ("w_in", "w_gate", "w_up", "w_down")}
    out = head.w_out.dequantize().astype(np.float64)

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + head.eps)

    state, found = w["w_in"] @ hidden, []
    for embedding in embeddings.astype(np.float64):
        z = np.concatenate((rms(state) * head.g_s, rms(embedding) * head.g_e))
        gate = w["w_gate"] @ z
        state = state + w["w_down"] @ (gate / (1 + np.exp(-gate)) * (w["w_up"] @ z))
        found.append(out @ (rms(state) * head.g_o))
    return np.stack(found)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("net", "kind", "slack"), [("torch", "Q4_1", 1e-4), ("native", "F32", 1e-4), ("native", "Q8_0", 0.15)]
)
def test_arithmetic(net: str, kind: str, slack: float, mixed: bool, target: Runner) -> None:
    """slack: what int8 activations may cost, of logits of about ±4."""
    head = random_head(target.spec, kind)
    if mixed:
        head = replace(head, w_up=quantize(head.w_up.dequantize(), "BF16"))
    if net == "native" and not pytest.importorskip("kernels.cpu").available():
        pytest.skip("no compiled kernels here")
    under_test = TorchNet(head) if net == "torch" else CompiledNet(head)
    if mixed and net == "native":
        # With dot products of bf16 the inputs of such a matrix are rounded too.
        slack = max(slack, 0.02)
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((3, head.hidden)).astype(np.float32)
    embeddings = rng.standard_normal((4, 3, head.hidden)).astype(np.float32)
    states = under_test.start(hidden)
    found = np.stack([under_test.step(states, np.ascontiguousarray(part)).copy() for part in embeddings])
    for row in range(3):
        assert np.abs(found[:, row] - reference(head, hidden[row], embeddings[:, row])).max() < slack


def pursuit(first: float, later: float, least: float = 0.0, slope: float = 0.0) -> Pursuit:
    """Chances of the first draft and of later ones whatever they claim, and the least that a chain must have."""
    trust = np.full((2, CLAIMS, 2), slope, np.float32)
    trust[0, :, 0], trust[1, :, 0] = first, later
    return Pursuit(trust, np.full(8, least, np.float32))


def run_of(target: Runner, params: SamplingParams, most: int = 4, choice: int = 0, **fields: Any) -> HeadRun:
    rng = np.random.default_rng(9)
    hidden = rng.standard_normal(target.spec.hidden_size).astype(np.float32)
    return HeadRun(Sequence(1, choice, params, [3, 5, 7, 9, 11], 3), hidden, most, **fields)


def chain(head: HeadFile, target: Runner, run: HeadRun) -> np.ndarray:
    tokens = [run.sequence.token_ids[-1], *run.ids[:-1]]
    return reference(head, run.hidden, target.embedding_rows(tokens))


@pytest.fixture(params=["torch", "native"])
def drafting(
    request: pytest.FixtureRequest, target: Runner, monkeypatch: pytest.MonkeyPatch
) -> tuple[HeadFile, HeadProposer]:
    """A head with fp32 weights and a trimmed vocabulary, on either path."""
    head = random_head(target.spec, vocab=80)
    if request.param == "native":
        if not pytest.importorskip("kernels.cpu").available():
            pytest.skip("no compiled kernels here")
        return head, HeadProposer(head, target, CompiledNet(head))
    monkeypatch.setattr(head_module, "_sampling", lambda size: (Sampler(size), head_module._plain_score))
    return head, HeadProposer(head, target, TorchNet(head))


def test_greedy_drafts_are_the_argmax(drafting: tuple[HeadFile, HeadProposer], target: Runner) -> None:
    head, proposer = drafting
    run = run_of(target, GREEDY)
    proposer.draft([run])
    logits = chain(head, target, run)
    assert run.ids == head.ids[logits.argmax(axis=1)].tolist()
    chances = np.exp(logits.max(axis=1)) / np.exp(logits).sum(axis=1)
    assert run.claims == pytest.approx(chances.tolist(), rel=1e-3)


def test_sampled_drafts_share_the_targets_noise(drafting: tuple[HeadFile, HeadProposer], target: Runner) -> None:
    """Also with penalties, which drafts ignore."""
    head, proposer = drafting
    params = SamplingParams(temperature=0.7, seed=21, frequency_penalty=1.0)
    run = run_of(target, params, choice=2)
    proposer.draft([run])
    scaled = chain(head, target, run) / 0.7
    for position, (token, row) in enumerate(zip(run.ids, scaled, strict=True)):
        # The next token stands at output position 2: two are committed.
        shared = noise.gumbel(21, 2 + position, head.ids, 2)
        assert token == head.ids[int(np.argmax(row + shared))]


def test_truncation_bias_and_bans_hold_for_drafts(drafting: tuple[HeadFile, HeadProposer], target: Runner) -> None:
    head, proposer = drafting
    best = run_of(target, SamplingParams(temperature=0.9, top_k=1))
    proposer.draft([best])
    greedy = run_of(target, GREEDY)
    proposer.draft([greedy])
    assert best.ids == greedy.ids
    banned = run_of(target, SamplingParams(temperature=0.0, logit_bias=((greedy.ids[0], -100.0),)))
    forced = run_of(target, SamplingParams(temperature=0.0, allowed_token_ids=(int(head.ids[5]),)))
    proposer.draft([banned, forced])
    assert banned.ids[0] != greedy.ids[0]
    assert forced.ids == [int(head.ids[5])] * 4


def test_a_batch_drafts_what_each_would_alone(drafting: tuple[HeadFile, HeadProposer], target: Runner) -> None:
    _, proposer = drafting
    params = [GREEDY, SamplingParams(temperature=1.0, seed=4), GREEDY]
    together = [run_of(target, item, most) for item, most in zip(params, (4, 2, 1), strict=True)]
    proposer.draft([*together, run_of(target, GREEDY, 0)])
    for run, item in zip(together, params, strict=True):
        alone = run_of(target, item, run.most)
        proposer.draft([alone])
        assert run.ids == alone.ids and len(run.ids) == run.most
    stopped = run_of(target, GREEDY, pursuit=pursuit(0.5, 0.5, least=0.3))
    proposer.draft([stopped])
    assert stopped.ids == together[0].ids[:2]


def test_drafts_for_rejection_come_with_their_distributions(
    drafting: tuple[HeadFile, HeadProposer], target: Runner
) -> None:
    head, proposer = drafting
    run = run_of(target, SamplingParams(temperature=0.8, seed=5, top_k=12), rejection=True)
    proposer.draft([run])
    assert len(run.distributions) == len(run.ids) == len(run.claims) == 4
    for token, (ids, chances) in zip(run.ids, run.distributions, strict=True):
        assert token in ids and len(ids) <= 12 and set(ids.tolist()) <= set(head.ids.tolist())
        assert chances.sum() == pytest.approx(1.0, abs=1e-5)
    coupled = run_of(target, SamplingParams(temperature=0.8, seed=5, top_k=12))
    proposer.draft([coupled])
    seeds = range(40)
    differ = 0
    for seed in seeds:
        pair = [
            run_of(target, SamplingParams(temperature=0.8, seed=seed, top_k=12), 1, rejection=r) for r in (False, True)
        ]
        proposer.draft(pair)
        differ += pair[0].ids != pair[1].ids
    assert differ > 5, "drafts for rejection share the verifier's noise"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    if not pytest.importorskip("kernels.cpu").available():
        pytest.skip("no compiled kernels here")
    path = tmp_path_factory.mktemp("compiled")
    make("llama", path)
    return load(path, kernels="native")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_whole_chains_are_what_single_steps_give(kind: str, mixed: bool, compiled: Runner) -> None:
    """Ids and claims of one native call against token by token, for all that it samples itself."""
    head = random_head(compiled.spec, kind, vocab=80)
    if mixed:
        head = replace(head, w_up=quantize(head.w_up.dequantize(), "BF16"))
    whole, single = HeadProposer(head, compiled), HeadProposer(head, compiled, CompiledNet(head))
    assert whole._chains is not None and single._chains is None
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.3, seed=4, top_k=5),
        SamplingParams(temperature=1.0, seed=2**64 - 1, top_p=0.7, presence_penalty=0.5),
        SamplingParams(temperature=1.5, seed=6, min_p=0.2),
        SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(0, 99, 2))),
    ]

    def runs() -> list[HeadRun]:
        rng, made = np.random.default_rng(1), []
        for turn in range(5):
            for index, item in enumerate(params):
                run = run_of(compiled, item, 1 + (turn + index) % 6, choice=turn)
                run.hidden = rng.standard_normal(head.hidden).astype(np.float32)
                # Claims of this head are near 1/80 to 1/10: some chains end early, some do not.
                run.pursuit = pursuit(0.0, 0.2, 0.02, slope=4.0) if turn % 2 else None
                made.append(run)
        return made

    found, expected = runs(), runs()
    whole.draft(found)
    single.draft(expected)
    assert [run.ids for run in found] == [run.ids for run in expected]
    for run, other in zip(found, expected, strict=True):
        assert run.claims == pytest.approx(other.claims, rel=1e-5)
    ended = [run for run in found if run.pursuit is not None and run.most > 1]
    assert 0 < sum(len(run.ids) < run.most for run in ended) < len(ended)


def test_a_chain_without_an_answer_ends(compiled: Runner) -> None:
    head = random_head(compiled.spec, "F32", vocab=80)
    run = run_of(compiled, GREEDY)
    run.hidden = np.full(head.hidden, np.nan, np.float32)
    HeadProposer(head, compiled).draft([run])
    assert run.ids == [] and run.claims == []


def test_what_a_chain_must_not_read(compiled: Runner) -> None:
    from kernels.cpu.draft_head import Chain, DraftHead

    head = random_head(compiled.spec, "F32", vocab=80)
    weights = CompiledNet(head).weights
    native = DraftHead(weights, compiled.embedding_tiles)  # type: ignore[attr-defined]
    hidden, sample = np.zeros(head.hidden, np.float32), (0.0, 1.0, 0.0, 0, 0, 0, 0, 0)
    assert len(native.draft([Chain(hidden, 3, 2, sample)])[0][0]) == 2
    bad = [
        Chain(hidden[:-1], 3, 2, sample),
        Chain(hidden.astype(np.float64), 3, 2, sample),
        Chain(hidden, compiled.spec.vocab_size, 2, sample),
        Chain(hidden, -1, 2, sample),
        Chain(hidden, 3, 2, sample, least=np.zeros(1, np.float32)),
        Chain(hidden, 3, 2, sample, trust=np.zeros(39, np.float32)),
    ]
    for chain_ in bad:
        with pytest.raises(ValueError, match=r"must be|is not below"):
            native.draft([chain_])
    foreign = replace(weights, ids=weights.ids + np.int32(compiled.spec.vocab_size))
    for part, reason in ((foreign, "no embedding"), (replace(weights, out=weights.gate), "out must be")):
        with pytest.raises(ValueError, match=reason):
            DraftHead(part, compiled.embedding_tiles)  # type: ignore[attr-defined]


def check_hidden(runner: Runner) -> None:
    """Both from one pass have the bits of each alone, and embedding rows are rows."""
    model, spec = runner._model, runner.spec  # type: ignore[attr-defined]
    assert spec.gives_hidden
    sequence = Sequence(1, 0, GREEDY, [7, 3, 5, 11, 2], 5)

    def step() -> tuple[object, object]:
        piece = Slice(sequence, [0, 1], 0, 5, (4, 6))
        batch = build_batch([piece], np.array([2, 4, 5, 6]), spec.block_size, spec.num_blocks)
        return batch, model.new_kv(2, spec.block_size, model.default_kv_dtype, 16)

    logits = model.logits(*step()).copy()
    hidden = model.hidden(*step())
    both = model.logits_and_hidden(*step())
    assert np.array_equal(both[0], logits) and np.array_equal(both[1], hidden)
    asked = runner.execute([Slice(sequence, [0, 1], 0, 5, (4, 6), hidden=True)])[0]
    plain = runner.execute([Slice(sequence, [0, 1], 0, 5, (4, 6))])[0]
    assert asked.hidden is not None and asked.hidden.shape == (3, spec.hidden_size) and plain.hidden is None
    assert np.array_equal(asked.hidden, hidden[1:]) and asked.token_ids == plain.token_ids
    rows = runner.embedding_rows([3, 9, 3])
    assert rows.dtype == np.float32 and np.array_equal(rows[0], rows[2]) and not np.array_equal(rows[0], rows[1])
    with pytest.raises(ValueError, match=str(spec.vocab_size)):
        runner.embedding_rows([spec.vocab_size])


def test_hidden_states_of_each_path(tiny: Runner) -> None:
    check_hidden(tiny)


def test_hidden_states_through_transformers(tmp_path: Path) -> None:
    make("llama", tmp_path)
    check_hidden(load(tmp_path, model_impl="transformers"))


@pytest.mark.slow
def test_hidden_states_of_two_processes(tmp_path: Path) -> None:
    make("llama-tied-bias", tmp_path, num_attention_heads=8, num_key_value_heads=4)
    shared = load(tmp_path, tensor_parallel_size=2)
    try:
        check_hidden(shared)
    finally:
        shared.close()
