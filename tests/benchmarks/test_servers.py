"""Servers under test: what each start runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cpubench.servers import Server, llama_server


def test_one_start_serves_all_workloads_that_want_the_same() -> None:
    server = Server("any", ["serve"], "m", {})
    assert server.starts(["w1", "w2", "w4"]) == [(["serve"], ["w1", "w2", "w4"])]


def test_workloads_with_arguments_of_their_own_get_a_start_of_their_own() -> None:
    server = llama_server("llama-server", Path("model.Q4_0.gguf"), "peer", 1, 2)
    starts = server.starts(["w1", "w2", "w2s", "w3", "w4"])
    assert [names for _, names in starts] == [["w1", "w4"], ["w2", "w2s"], ["w3"]]
    slots = [int(command[command.index("-np") + 1]) for command, _ in starts]
    contexts = [int(command[command.index("-c") + 1]) for command, _ in starts]
    assert slots == [1, 32, 8]
    # Every slot must hold its workload's prompt and answer.
    needs = [4096 + 1, 128 + 64, 1024 + 32 + 32]
    assert all(context // slot >= need for context, slot, need in zip(contexts, slots, needs, strict=True))
