"""/metrics of a real engine server: what requests did is what it counts."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_service.settings import EngineSettings
from engine_service.speculation import NullSpeculation
from engine_service.speculation.client import ClientStats
from engine_service.speculation.stats import HeadStats, SpeculationStats
from tandem.inference.v1 import inference_pb2 as pb
from tandem.metrics import GpuCollector
from tests.engine_service.server import Server, ask, serve
from tests.engine_service.test_generate import SAY, says

MODEL = {"model_name": "fake"}


class Scrape:
    def __init__(self, server: Server) -> None:
        assert server.process.metrics is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{server.process.metrics.port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]


async def test_requests_are_counted_under_vllms_names() -> None:
    async with serve(says(SAY), metrics_listen="127.0.0.1:0") as server:
        stop = pb.StopConditions(max_tokens=150)
        tokens = len(SAY.encode()) + 1
        for _ in range(2):
            await server.generate(ask(stop=stop))
        await server.idle()
        got = Scrape(server)
        assert got("vllm:prompt_tokens_total", **MODEL) == 10
        assert got("vllm:generation_tokens_total", **MODEL) == 2 * tokens
        assert got("vllm:request_success_total", finished_reason="stop", **MODEL) == 2
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency"):
            assert got(f"vllm:{name}_seconds_count", **MODEL) == 2, name
        assert got("vllm:inter_token_latency_seconds_count", **MODEL) == 2 * (tokens - 1)
        assert got("vllm:request_generation_tokens_sum", **MODEL) == 2 * tokens
        assert got("vllm:num_requests_running", **MODEL) == got("vllm:num_requests_waiting", **MODEL) == 0
        assert got("vllm:kv_cache_usage_perc", **MODEL) == 0
        assert got("tandem_engine_steps_total", **MODEL) == server.engine.stats.steps > 0
        assert got("tandem_engine_state", state="ready") == 1 and got("tandem_engine_state", state="stuck") == 0
        assert got("tandem_engine_requests_aborted_total", **MODEL) == 0
        assert got("process_resident_memory_bytes") > 10e6 and got("process_cpu_seconds_total") > 0


async def test_cached_prompt_tokens_and_hang_ups_are_counted() -> None:
    prompt = list(range(1, 34))
    async with serve(says("x" * 40, prompt="p" * 33), metrics_listen="127.0.0.1:0") as server:
        for _ in range(2):
            await server.generate(ask(token_ids=pb.TokenIds(ids=prompt)))
        server.runner.gate.clear()
        call = server.call(ask(token_ids=pb.TokenIds(ids=prompt), stop=pb.StopConditions(max_tokens=39)))
        await call.read()
        call.cancel()
        while server.engine.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.runner.gate.set()
        await server.idle()
        got = Scrape(server)
        hits, queries = got("vllm:prefix_cache_hits_total", **MODEL), got("vllm:prefix_cache_queries_total", **MODEL)
        assert 0 < hits < queries
        assert got("tandem_engine_requests_aborted_total", **MODEL) == 1


async def test_speculation_is_told_by_proposer_and_position(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Counting(NullSpeculation):
        def __init__(self) -> None:
            self.stats = SpeculationStats(ClientStats(questions=7, misses=2))
            self.stats.proposer("ngram").add(3, 2)
            self.stats.proposer("suffix").add(1, 1)
            self.stats.proposer("head").add(2, 1)
            self.stats.client.answers, self.stats.client.latency_us_sum = 4, 8_000.0
            self.stats.head = HeadStats(calls=5, drafted=9, spent_us=2_500.0)

    async with serve(says("hi"), speculation=Counting(), metrics_listen="127.0.0.1:0") as server:
        got = Scrape(server)
        assert got("vllm:spec_decode_num_drafts_total", **MODEL) == 3
        assert got("vllm:spec_decode_num_draft_tokens_total", **MODEL) == 6
        assert got("vllm:spec_decode_num_accepted_tokens_total", **MODEL) == 4
        assert got("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0", **MODEL) == 3
        assert got("tandem_speculation_proposed_tokens_total", proposer="ngram", position="2") == 1
        assert got("tandem_speculation_accepted_tokens_total", proposer="ngram", position="2") == 0
        assert got("tandem_speculation_acceptance_length", proposer="ngram") == 3.0
        assert got("tandem_speculation_deadline_misses_total", **MODEL) == 2
        assert got("tandem_speculation_accepted_tokens_total", proposer="head", position="0") == 1
        assert got("tandem_speculation_accepted_tokens_total", proposer="head", position="1") == 0
        assert got("tandem_speculation_acceptance_length", proposer="head") == 2.0
        assert got("tandem_speculation_answer_seconds_total", **MODEL) == pytest.approx(0.008)
        assert got("tandem_speculation_head_seconds_total", **MODEL) == pytest.approx(0.0025)
        assert got("tandem_speculation_head_tokens_total", **MODEL) == 9
    (line,) = [record for record in caplog.records if record.getMessage() == "speculation"]
    assert vars(line)["proposers"]["head"] == {
        "proposed": 2,
        "accepted": 1,
        "acceptance_length": 2.0,
        "accepted_by_position": [1.0, 0.0],
    }
    assert (vars(line)["answer_ms"], vars(line)["head_ms"], vars(line)["deadline_misses"]) == (2.0, 0.5, 2)


async def test_metrics_are_off_by_default_and_need_a_port() -> None:
    async with serve(says("hi")) as server:
        assert server.process.metrics is None and server.engine.metrics is None
    with pytest.raises(ValueError, match="host:port is needed"):
        EngineSettings(metrics_listen="unix:/run/m.sock")


def test_gpu_values_that_a_device_does_not_tell_are_left_out() -> None:
    class Nvml:
        NVMLError = RuntimeError

        def nvmlDeviceGetCount(self) -> int:
            return 1

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetName(self, handle: int) -> str:
            return "H200"

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
            return type("Memory", (), {"used": 3, "total": 4})

        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
            raise RuntimeError("not supported")

    families = {family.name: family.samples for family in GpuCollector(Nvml()).collect()}
    assert families["tandem_gpu_memory_used_bytes"][0].value == 3
    assert families["tandem_gpu_utilization_ratio"] == []
