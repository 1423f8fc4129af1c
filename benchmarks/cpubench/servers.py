"""Servers under test: Tandem, and peers where they are installed. Each is started for its turn and stopped after it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil


@dataclass(frozen=True)
class Server:
    """How to start one server, and what its requests need so that stop tokens do not end them."""

    name: str
    command: list[str]
    model: str
    extra: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    # Arguments that suit one workload best: a server whose slots have a fixed size is started anew where they differ.
    per_workload: dict[str, list[str]] = field(default_factory=dict)

    def starts(self, workloads: list[str]) -> list[tuple[list[str], list[str]]]:
        """The starts that these workloads need: (command, workloads of that start), in order."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for workload in workloads:
            groups.setdefault(tuple(self.per_workload.get(workload, [])), []).append(workload)
        return [([*self.command, *arguments], names) for arguments, names in groups.items()]


@dataclass
class Running:
    """A started server. Seconds from start to the first answer of /v1/models."""

    url: str
    process: psutil.Process
    ready_s: float

    def pss_mib(self) -> float:
        """Proportional memory of the whole process tree."""
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.Error, AttributeError):
                continue
        return total / 2**20


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tandem(model: str, draft: str, port: int, name: str = "tandem") -> Server:
    command = [sys.executable, "-c", "from tandem.cli.main import main; main()", "serve"]
    command += ["--port", str(port), "--model", model, "--draft", draft, "--log-level", "warning"]
    return Server(name, command, "", {"ignore_eos": True})


def llama_server(binary: str, gguf: Path, name: str, port: int, threads: int) -> Server:
    """llama.cpp's own server, with slots and context as each workload wants them."""
    command = [binary, "-m", str(gguf), "--port", str(port), "-t", str(threads), "-tb", str(threads)]
    many = ["-np", "32", "-c", "8192", "--no-kv-unified"]
    shared = ["-np", "8", "-c", "16384"]
    one = ["-np", "1", "-c", "8192"]
    slots = {"w1": one, "w2": many, "w2s": many, "w3": shared, "w4": one}
    return Server(name, command, "m", {"ignore_eos": True}, per_workload=slots)


def peers(gguf: Path, others: list[Path], hf_dir: Path | None, port: int, threads: int) -> list[Server]:
    """The peers that are installed here: llama-server with the same file and with `others`, and vLLM."""
    found = []
    if binary := shutil.which("llama-server"):
        found.append(llama_server(binary, gguf, "llama-server", port, threads))
        found += [llama_server(binary, other, f"llama-server {_format(other)}", port, threads) for other in others]
    elif importlib.util.find_spec("llama_cpp"):
        command = [sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port)]
        command += ["--n_ctx", "8192", "--n_threads", str(threads)]
        found.append(Server("llama-cpp-python", command, "m", {"logit_bias": {"0": -100, "2": -100}}))
    if (binary := shutil.which("vllm")) and hf_dir is not None:
        command = [binary, "serve", str(hf_dir), "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "HF_HUB_OFFLINE": "1",
        }
        found.append(Server("vllm", command, str(hf_dir), {"ignore_eos": True}, environment))
    return found


def _format(gguf: Path) -> str:
    """The quantisation that a file's name gives: model.Q4_0.gguf → Q4_0."""
    return gguf.stem.rsplit(".", 1)[-1]


@contextmanager
def started(server: Server, command: list[str], port: int, log: Path, limit_s: float = 300.0) -> Iterator[Running]:
    """Starts a server by one of its commands and waits until it answers; ends its whole group afterwards.

    Raises RuntimeError if it ends or does not answer in time.
    """
    start, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **server.environment}, start_new_session=True
        )
    try:
        while True:
            if child.poll() is not None:
                raise RuntimeError(f"{server.name} ended with {child.returncode}: {log.read_text()[-500:]}")
            try:
                answer = httpx.get(f"{url}/v1/models", timeout=2)
                if answer.status_code == 200 and answer.json().get("data"):
                    break
            except (httpx.HTTPError, ValueError):
                pass
            if time.perf_counter() - start > limit_s:
                raise RuntimeError(f"{server.name} did not answer within {limit_s:.0f} s")
            time.sleep(0.05)
        yield Running(url, psutil.Process(child.pid), time.perf_counter() - start)
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
