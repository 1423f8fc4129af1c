"""The real process over its real protocol."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from draft_service.settings import DraftSettings
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc as rpc

RUN = "import sys; from draft_service.main import run; from draft_service.settings import DraftSettings; "
RUN += "sys.exit(run(DraftSettings(listen=sys.argv[1])))"


def start_process(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RUN, address], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "draft ready" in line:
            return process
    raise AssertionError(f"draft ended with {process.wait()}")


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="td") as name:
        yield Path(name)


@pytest.fixture
def address(directory: Path) -> Iterator[str]:
    target = f"unix:{directory}/d.sock"
    process = start_process(target)
    yield target
    process.terminate()
    assert process.wait(10) == 0
    assert not (directory / "d.sock").exists()


def test_serves_proposals_info_health_and_reflection(address: str, directory: Path) -> None:
    assert stat.S_IMODE((directory / "d.sock").stat().st_mode) == 0o600
    with grpc.insecure_channel(address) as channel:
        stub = rpc.DraftServiceStub(channel)
        update = pb.SequenceUpdate(id=1, new_ids=[1, 2, 3, 1, 2], prompt_len=5, want=2)
        questions = [pb.ProposeRequest(step=n, engine_epoch=1, sequences=[update]) for n in (1, 2, 3)]
        answers = list(stub.Propose(iter(questions)))
        assert [answer.step for answer in answers] == [1, 2, 3]
        assert list(answers[0].proposals[0].draft_ids) == [3, 1]
        info = stub.GetDraftInfo(pb.GetDraftInfoRequest())
        assert info.epoch == answers[0].draft_epoch != 0
        assert list(info.proposers) == ["ngram", "suffix"]
        assert info.questions == 3
        assert 10e6 < info.rss_bytes < 200e6
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="tandem.draft.v1.DraftService")
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {service.name for service in next(listing).list_services_response.service}
        assert "tandem.draft.v1.DraftService" in names


def test_a_second_process_is_refused_and_a_dead_socket_is_replaced(directory: Path) -> None:
    target = f"unix:{directory}/d.sock"
    first = start_process(target)
    second = subprocess.run([sys.executable, "-c", RUN, target], capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert "another process serves" in second.stderr
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    third = start_process(target)
    third.send_signal(signal.SIGINT)
    assert third.wait(10) == 0


def test_drafts_without_a_model_load_no_torch() -> None:
    code = (
        "import sys; from draft_service import main; from draft_service.build import build_proposer;"
        "from draft_service.settings import DraftSettings; build_proposer(DraftSettings());"
        "sys.exit(' '.join(m for m in ('torch', 'transformers') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("proposers", "ngram,oracle", "oracle"),
        ("proposers", "", "at least one"),
        ("proposers", "ngram,ngram", "once"),
        ("ngram_lengths", "3,x", "whole numbers"),
        ("ngram_lengths", "0", "1 to 64"),
        ("listen", "nowhere", "neither"),
        ("max_sequences", 0, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(field: str, value: object, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DraftSettings(**{field: value})  # type: ignore[arg-type]
