"""The simulator: traces, the engine model, and that the exact policy wins where it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import router_sim
from benchmarks.simulation import traces
from benchmarks.simulation.engine import MODELS, ServiceModel, SimEngine, SimRequest
from benchmarks.simulation.traces import TraceRequest
from benchmarks.simulation.world import SimConfig, World


def test_traces_are_seeded_and_shaped() -> None:
    for name, (tokens, share) in {"conversation": (12_000, 0.4), "toolagent": (8_600, 0.59)}.items():
        trace = traces.generate(name, 6000, 40, seed=3)
        assert trace.requests == traces.generate(name, 6000, 40, seed=3).requests
        assert trace.requests != traces.generate(name, 6000, 40, seed=4).requests
        mean = sum(request.input_length for request in trace.requests) / 6000
        assert 0.75 * tokens < mean < 1.25 * tokens
        assert share - 0.15 < trace.reusable_share() < share + 0.15
        times = [request.at_s for request in trace.requests]
        assert times == sorted(times)
        assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in trace.requests)


def test_file_round_trip_and_bad_lines(tmp_path: Path) -> None:
    trace = traces.generate("conversation", 50, 10, seed=1)
    path = tmp_path / "t.jsonl"
    traces.write(path, trace.requests)
    again = traces.read(path)
    assert [r.hash_ids for r in again.requests] == [r.hash_ids for r in trace.requests]
    assert again.requests[0].at_s == 0
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n{"input_length": 5}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:2"):
        traces.read(path)


class Log:
    """What an engine reported."""

    def __init__(self, model: ServiceModel) -> None:
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self.first: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.engine = SimEngine(
            model,
            10,
            self.stored.extend,
            self.removed.extend,
            lambda request, now: self.first.__setitem__(id(request), now),
            lambda request, now, ok: self.done.__setitem__(id(request), now),
        )

    def drain(self, at: float) -> None:
        while at < float("inf"):
            at = self.engine.run(at)


def sim_request(tokens: int, output: int, *ids: int) -> SimRequest:
    return SimRequest(TraceRequest(0.0, tokens, output, ids), [i.to_bytes(16, "little") for i in ids], 1e9)


MODEL = ServiceModel("test", 1000.0, 0.01, 0.001, 100, 4, 2, 200)


def test_engine_times_add_up() -> None:
    log = Log(MODEL)
    request = sim_request(50, 11, 1, 2, 3, 4, 5)
    log.drain(log.engine.add(request, 1.0))
    assert log.first[id(request)] == pytest.approx(1.0 + 0.05 + 0.01)
    assert log.done[id(request)] == pytest.approx(1.06 + 10 * 0.011)
    assert len(log.stored) == 5
    again = sim_request(50, 1, 1, 2, 3, 4, 5)
    log.drain(log.engine.add(again, 5.0))
    assert again.cached_tokens == 49, "the last token is computed"
    assert log.first[id(again)] == pytest.approx(5.0 + 0.001 + 0.01)


def test_engine_evicts_the_end_of_the_oldest_chain() -> None:
    log = Log(MODEL)
    for start in (0, 10, 20):
        log.drain(log.engine.add(sim_request(70, 5, *range(start, start + 7)), float(start)))
    assert log.removed[0] == (6).to_bytes(16, "little")
    held = set(log.stored) - set(log.removed)
    assert (0).to_bytes(16, "little") in held
    assert len(held) <= 20


def test_newcomer_joins_a_running_batch() -> None:
    log = Log(MODEL)
    one, two = sim_request(10, 100, 1), sim_request(10, 2, 2)
    end = log.engine.add(one, 0.0)
    end = log.engine.run(end)
    log.drain(log.engine.add(two, 0.5))
    assert 0.5 < log.first[id(two)] < 0.55
    assert log.done[id(two)] < log.done[id(one)]


def test_same_seed_same_result() -> None:
    trace = traces.generate("toolagent", 150, 12, seed=1)
    runs = [World(trace, MODELS["gpu-8b"], SimConfig("prefix_exact", engines=4, routers=2)).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0].ttfts) == 150


@pytest.mark.parametrize("name", ["conversation", "toolagent"])
def test_exact_beats_the_others(name: str) -> None:
    rate = router_sim.DEFAULT_RATES["gpu-8b"][name]
    trace = traces.generate(name, 1500, 8 * rate, seed=2)
    results = {
        policy: World(trace, MODELS["gpu-8b"], SimConfig(policy, engines=8, routers=2)).run()
        for policy in ("round_robin", "least_load", "consistent_hash", "prefix_approx", "prefix_exact")
    }
    exact = results.pop("prefix_exact")
    for other in results.values():
        assert exact.ttft_p99_s < other.ttft_p99_s
        assert exact.served >= other.served
        assert exact.hit_rate > other.hit_rate - 0.02


def test_slow_engine_is_avoided() -> None:
    trace = traces.generate("conversation", 300, 6, seed=2)
    exact, turns = (
        World(trace, MODELS["gpu-8b"], SimConfig(policy, engines=6, slow_engines=1)).run()
        for policy in ("prefix_exact", "round_robin")
    )
    assert exact.ttft_p99_s < turns.ttft_p99_s / 2


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"
    assert router_sim.main(["--generate", "burst", "--requests", "80", "--out", str(out)]) == 0
    results = tmp_path / "r.json"
    arguments = ["--file", str(out), "--block-tokens", "64", "--engines", "2", "--speed", "2", "--json", str(results)]
    assert router_sim.main([*arguments, "--plots", str(tmp_path / "plots")]) == 0
    assert "prefix_exact" in capsys.readouterr().out
    assert len(json.loads(results.read_text())) == 5
    svgs = list((tmp_path / "plots").glob("*.svg"))
    assert len(svgs) == 5 and all(svg.read_text().startswith("<svg") for svg in svgs)
    with pytest.raises(SystemExit):
        router_sim.main(["--engines", "2000"])
