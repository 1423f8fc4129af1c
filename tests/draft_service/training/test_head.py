"""Training a head: labels, resuming, what it learns, what is counted, and the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.training.head import pack
from draft_service.training.head_fit import HeadPlan, Labels, Target, Trainer, choose_vocab, label
from draft_service.training.head_measure import measure_head
from draft_service.training.states import Corpus
from tandem.lm import noise
from tandem.lm.proposers.head_file import load_head, save_head
from tandem.lm.proposers.head_net import TorchNet

VOCAB, HIDDEN = 64, 32
PLAN = HeadPlan(seed=1, intermediate=64, vocab=48, negatives=16, epochs=3, batch=32, warmup=5, rate=5e-3, warm_rows=0)


def target() -> Target:
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    return Target(rows, rows, "digest")


def corpus(answers: int, length: int = 24, seed: int = 2, used: int = VOCAB) -> Corpus:
    """Answers of a source in which a token decides the next but for one in ten. A state points at its token."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(5).permutation(used)
    rows = target().head.numpy()
    tokens = np.empty((answers, length), np.int64)
    tokens[:, 0] = rng.integers(0, used, answers)
    for place in range(1, length):
        drawn = rng.integers(0, used, answers)
        tokens[:, place] = np.where(rng.random(answers) < 0.9, table[tokens[:, place - 1]], drawn)
    flat = tokens.reshape(-1)
    hidden = (rows[flat] + 0.1 * rng.standard_normal((len(flat), HIDDEN))).astype(np.float16)
    place = np.tile(np.arange(length), answers)
    return Corpus(hidden, flat, length - 1 - place, np.repeat(np.arange(answers), length), place)


def trainer(plan: HeadPlan = PLAN, data: Corpus | None = None) -> Trainer:
    data = corpus(40) if data is None else data
    ids = choose_vocab(data.tokens, plan.vocab, VOCAB)
    return Trainer(plan, target(), data, ids, label(data, target(), ids, plan.labels, plan.label_temperature))


def silent(step: int, steps: int, loss: float, left: float) -> None:
    return


def test_vocabulary_is_the_most_frequent_ids_and_of_equals_the_lowest() -> None:
    tokens = np.array([5, 5, 5, 9, 9, 2, 7])
    assert choose_vocab(tokens, 3, 12).tolist() == [2, 5, 9]
    assert choose_vocab(tokens, 6, 12).tolist() == [0, 1, 2, 5, 7, 9]
    assert len(choose_vocab(tokens, 100, 12)) == 12


def test_labels_are_the_targets_likeliest_ids() -> None:
    data, of = corpus(3), target()
    ids = np.array([3, 8, 20, 21, 40], np.int32)
    found = label(data, of, ids, 2, 0.5)
    for row in (0, 17, 71):
        logits = of.head.numpy()[ids] @ data.hidden[row].astype(np.float32) / 0.5
        order = np.argsort(-logits)[:2]
        assert found.ids[row].tolist() == order.tolist()
        chances = np.exp(logits[order] - logits[order].max())
        assert found.chances[row] == pytest.approx(chances / chances.sum(), abs=2e-3)


def test_learns_the_source(tmp_path: Path) -> None:
    under_test = trainer(HeadPlan(**{**_fields(PLAN), "epochs": 6, "vocab": VOCAB, "rate": 1e-2}), corpus(60))
    test, rows = corpus(20, seed=9), target().embedding.numpy()

    def forced() -> list[float]:
        net = TorchNet(pack(under_test, target(), "Q8_0"))
        return [right / tried for right, tried in measure_head(net, under_test.ids, test, rows, 3).forced]

    assert max(forced()) < 0.2
    under_test.run(tmp_path / "c", silent)
    # One step in ten goes anywhere.
    assert min(forced()) > 0.7


def test_begins_with_a_linear_guess_that_is_better_than_none(tmp_path: Path) -> None:
    """The source's states are linear in the last token's embedding but for the permutation's part."""
    under_test = trainer(HeadPlan(**{**_fields(PLAN), "warm_rows": 1000, "vocab": VOCAB, "rate": 0.0}), corpus(60))
    under_test.run(tmp_path / "c", silent, stop_after=1)
    test, rows = corpus(20, seed=9), target().embedding.numpy()
    net = TorchNet(pack(under_test, target(), "F32"))
    right, tried = measure_head(net, under_test.ids, test, rows, 1).forced[0]
    assert right / tried > 0.15


def test_a_stopped_training_goes_on_to_equal_weights(tmp_path: Path) -> None:
    whole = trainer()
    whole.run(tmp_path / "whole", silent)
    first = trainer()
    first.run(tmp_path / "parts", silent, stop_after=7)
    assert first.step == 7
    second = trainer()
    second.run(tmp_path / "parts", silent)
    assert second.step == whole.step == whole.steps > 20
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, second.module.state_dict()[name]), name


def test_another_plan_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    trainer().run(tmp_path / "c", silent, stop_after=1)
    other = trainer(HeadPlan(**{**_fields(PLAN), "rate": 1e-3}))
    with pytest.raises(ValueError, match="another plan"):
        other.run(tmp_path / "c", silent)


def test_sampled_softmax_is_the_whole_one_when_all_ids_are_candidates() -> None:
    plan = HeadPlan(**{**_fields(PLAN), "negatives": 48, "weights": (1.0,), "shares": (1.0,)})
    under_test = trainer(plan)
    rows = under_test._batch()
    data, labels = under_test._corpus, under_test._labels
    with torch.no_grad():
        state = under_test.module.start(torch.from_numpy(data.hidden[rows].astype(np.float32)))
        state = under_test.module.advance(state, target().embedding[torch.from_numpy(data.tokens[rows])])
        logs = torch.log_softmax(under_test.module.logits(state, under_test._out), dim=1).numpy()
        loss = float(under_test._loss(rows))
    wanted = [
        -sum(float(c) * logs[at, i] for i, c in zip(labels.ids[row + 1], labels.chances[row + 1], strict=True))
        for at, row in enumerate(rows)
    ]
    assert loss == pytest.approx(np.mean(wanted), rel=1e-4)


def test_answers_of_one_token_teach_nothing() -> None:
    data = corpus(5, length=1)
    with pytest.raises(ValueError, match="nothing to learn"):
        Trainer(PLAN, target(), data, np.arange(48, dtype=np.int32), Labels(np.zeros((5, 1)), np.ones((5, 1))))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_acceptance_is_what_drafting_one_by_one_gives(tmp_path: Path, temperature: float) -> None:
    """Counted again by hand: each position alone, plain loops, and stopping at the first wrong draft."""
    under_test = trainer()
    under_test.run(tmp_path / "c", silent, stop_after=40)
    data = corpus(6, length=9, seed=4)
    data = Corpus(data.hidden, data.tokens, data.left, data.talk + (7 << 32), data.place)
    net, ids, rows = TorchNet(pack(under_test, target(), "F32")), under_test.ids, target().embedding.numpy()
    found = measure_head(net, ids, data, rows, 4, temperature)
    reached, right, forced_right, forced_tried, positions = [0] * 4, [0] * 4, [0] * 4, [0] * 4, 0
    for row in range(len(data)):
        if data.left[row] < 1:
            continue
        positions += 1
        for own in (True, False):
            state = net.start(data.hidden[row : row + 1].astype(np.float32)).copy()
            token, good = data.tokens[row], True
            for ahead in range(1, min(4, data.left[row]) + 1):
                logits = net.step(state, rows[[token]])[0]
                if temperature:
                    keys = (int(data.talk[row]), int(data.place[row]) + ahead)
                    logits = logits / temperature + noise.gumbel(*keys, ids, 0)
                draft, truth = ids[int(np.argmax(logits))], data.tokens[row + ahead]
                if own:
                    reached[ahead - 1] += good
                    good = good and draft == truth
                    right[ahead - 1] += good
                else:
                    forced_tried[ahead - 1] += 1
                    forced_right[ahead - 1] += draft == truth
                token = draft if own else truth
    assert (found.free.reached, found.free.right, found.free.positions) == (reached, right, positions)
    assert found.forced == list(zip(forced_right, forced_tried, strict=True))
    assert 0 < right[0] < positions


def test_the_file_gives_back_what_was_packed(tmp_path: Path) -> None:
    under_test = trainer()
    under_test.run(tmp_path / "c", silent, stop_after=5)
    head = pack(under_test, target(), "Q8_0", card={"steps": 5})
    save_head(tmp_path / "h.safetensors", head)
    loaded = load_head(tmp_path / "h.safetensors")
    assert loaded.card == {"steps": 5}
    assert (loaded.w_gate.kind, loaded.w_out.kind) == ("Q8_0", PLAN.out_kind)
    # The output matrix is the very one that was trained with.
    assert np.array_equal(loaded.w_out.dequantize(), under_test.module.state_dict()["w_out"].numpy())
    data, rows = corpus(3), target().embedding.numpy()
    reports = [measure_head(TorchNet(part), under_test.ids, data, rows).report() for part in (head, loaded)]
    assert reports[0] == reports[1]


def _fields(plan: HeadPlan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in HeadPlan.__slots__}
