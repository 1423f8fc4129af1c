"""Operations: health, metrics, openapi, CORS, TLS, workers, tokenize, imports."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.routes import ROUTERS
from tests.gateway.conftest import LoopThread, Stand
from tests.gateway.mock_router import MODEL, tokenizer

ROOT = Path(__file__).resolve().parents[2]
BODY = {"prompt": "one two three", "max_tokens": 3, "temperature": 0}


def test_health_ready_version(stand: Stand) -> None:
    from tandem import __version__

    assert stand.http.get("/health").json() == {"status": "ok"}
    assert stand.http.get("/ready").json() == {"status": "ready", "models": [MODEL]}
    assert stand.http.get("/version").json() == {"version": __version__}


def test_metrics_count_requests_and_tokens(make_stand: Any) -> None:
    stand = make_stand()
    stand.post("/v1/completions", BODY)
    with stand.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        answer.read()
    text, until = "", time.monotonic() + 10
    # A stream is counted when its last byte is out, which the client may see a moment earlier.
    while 'path="/v1/completions",status="200"} 2.0' not in text and time.monotonic() < until:
        text = stand.http.get("/metrics").text
    for line in (
        f'vllm:request_success_total{{finished_reason="length",model_name="{MODEL}"}} 2.0',
        f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 6.0',
        f'vllm:prompt_tokens_total{{model_name="{MODEL}"}} 6.0',
        f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL}"}} 2.0',
        f'vllm:inter_token_latency_seconds_count{{model_name="{MODEL}"}} 2.0',
        "vllm:num_requests_running 0.0",
        'tandem_gateway_http_requests_total{path="/v1/completions",status="200"} 2.0',
    ):
        assert line in text, line


def test_openapi_names_every_route_and_no_422(stand: Stand) -> None:
    document = stand.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= set(document["paths"])
    served = {route.path for router in ROUTERS for route in router.routes}
    assert {path.replace("{model}", "{model:path}") for path in document["paths"]} == served
    seed = document["components"]["schemas"]["ChatBody"]["properties"]["top_k"]["anyOf"][0]
    assert seed["minimum"] == -1 and seed["exclusiveMaximum"] == 2**31
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    references = _references(document)
    assert references and all(name in document["components"]["schemas"] for name in references)


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rsplit("/", 1)[1]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(_references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(_references(item) for item in value))
    return set()


def test_cors_is_off_unless_asked_for(stand: Stand, make_stand: Any) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in stand.http.options("/v1/completions", headers=asked).headers
    open_stand = make_stand(cors_origins="https://app.example, https://b.example")
    answer = open_stand.http.options("/v1/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = open_stand.post("/v1/completions", BODY, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_tokenize_and_detokenize(stand: Stand) -> None:
    ids = tokenizer().encode("naïve 漢字 😀")
    answer = stand.post("/tokenize", {"prompt": "naïve 漢字 😀", "return_token_strs": True}).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == 2048
    assert len(answer["token_strs"]) == len(ids)
    assert stand.post("/detokenize", {"tokens": ids}).json() == {"prompt": "naïve 漢字 😀"}
    messages = stand.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert tokenizer().decode(messages, skip_special=False).endswith("<|im_start|>assistant\n")
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [49152]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ):
        assert stand.post(path, body).status_code == 400, body


def test_embedding_errors(stand: Stand) -> None:
    path = "/v1/embeddings"
    for body, param in (
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [5] * 3000}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": "x", "dimensions": 3}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ):
        answer = stand.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert stand.post(path, {"input": [5] * 3000, "truncate_prompt_tokens": -1}).status_code == 200
    stand.post(path, {"input": "x", "pooling": "last", "normalize": False})
    assert stand.router.embeds[-1].pooling == 2 and stand.router.embeds[-1].normalize is False


def test_the_gateway_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import gateway.main, gateway.app; from gateway.settings import GatewaySettings;"
        "gateway.app.build_app(GatewaySettings());"
        "print({'torch', 'transformers', 'engine_service', 'router'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def _certificate(folder: Path, name: str, issuer: str = "") -> tuple[Path, Path]:
    """A certificate and key for localhost, signed by the one named `issuer` or by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-keyout", str(key), "-out", str(cert), "-addext", "subjectAltName=DNS:localhost"]
    if issuer:
        command += ["-CA", str(folder / f"{issuer}.pem"), "-CAkey", str(folder / f"{issuer}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "unknown option" in done.stderr.lower():
        pytest.skip("this openssl cannot sign with -CA")
    assert done.returncode == 0, done.stderr
    return cert, key


def test_https_with_client_certificates(make_stand: Any, tmp_path: Path) -> None:
    ca, _ = _certificate(tmp_path, "ca")
    cert, key = _certificate(tmp_path, "server", "ca")
    client_cert, client_key = _certificate(tmp_path, "client", "ca")
    trust = ssl.create_default_context(cafile=str(ca))
    trust.check_hostname = False
    stand = make_stand(tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(ca), client_options={"verify": trust})
    with pytest.raises(httpx.TransportError):
        stand.http.get("/health")
    trust.load_cert_chain(str(client_cert), str(client_key))
    with httpx.Client(base_url=stand.url, verify=trust, timeout=60, trust_env=False) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_mutual_tls_towards_the_router(make_stand: Any, tmp_path: Path, router_loop: LoopThread) -> None:
    import grpc

    from tandem import rpc
    from tandem.inference.v1 import inference_pb2_grpc as pb_grpc
    from tests.gateway.mock_router import MockRouter

    ca, _ = _certificate(tmp_path, "ca")
    cert, key = _certificate(tmp_path, "server", "ca")
    ours, our_key = _certificate(tmp_path, "gateway", "ca")

    async def start() -> tuple[Any, int]:
        server, _ = rpc.server()
        pb_grpc.add_InferenceServiceServicer_to_server(MockRouter(), server)
        pair = [(key.read_bytes(), cert.read_bytes())]
        credentials = grpc.ssl_server_credentials(pair, ca.read_bytes(), require_client_auth=True)
        port = server.add_secure_port("localhost:0", credentials)
        await server.start()
        return server, port

    server, port = router_loop.run(start())
    try:
        settings = {"router": f"localhost:{port}", "router_tls_ca": str(ca)}
        stranger = make_stand(**settings)
        assert stranger.post("/v1/completions", BODY).status_code == 503
        known = make_stand(**settings, router_tls_cert=str(ours), router_tls_key=str(our_key))
        # A handshake may take its time on a busy host.
        until = time.monotonic() + 60
        while known.http.get("/ready").status_code != 200:
            assert time.monotonic() < until, "the router was never reached"
            time.sleep(0.1)
        assert known.post("/v1/completions", BODY).status_code == 200
    finally:
        router_loop.run(server.stop(0))


def test_workers_share_the_port_and_the_rates(mock: Any, tmp_path: Path) -> None:
    import json
    import socket

    from gateway.keys import hash_key

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "a", "sha256": hash_key("sk-a"), "requests_per_minute": 12}]}))
    code = (
        "from gateway.main import run; from gateway.settings import GatewaySettings;"
        f"raise SystemExit(run(GatewaySettings(port={port}, workers=2, router='127.0.0.1:{mock[1]}',"
        f"keys_file={str(keys)!r}, grace=1)))"
    )
    script = tmp_path / "start.py"
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process)
        statuses: list[int] = []
        began = time.monotonic()
        for _ in range(20):
            # A new connection each time, so that both workers get some.
            answer = httpx.post(
                url + "/v1/completions",
                json=BODY,
                headers={"authorization": "Bearer sk-a"},
                timeout=30,
                trust_env=False,
            )
            statuses.append(answer.status_code)
        # Twelve at once, and one more every five seconds; with rates of their own the workers would give twice that.
        most = 12 + (time.monotonic() - began) / 5 + 1
        assert 12 <= statuses.count(200) <= most and statuses.count(429) == 20 - statuses.count(200)
        text = httpx.get(url + "/metrics", trust_env=False).text
        assert f'status="200"}} {float(statuses.count(200))}' in text, "metrics are added up over workers"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def _wait_ready(url: str, process: Any) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, process.stderr.read().decode()
        try:
            if httpx.get(url + "/ready", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the workers did not get ready")


def test_long_prompts_are_tokenized_off_the_event_loop(stand: Stand) -> None:
    """Other threads run while a long text is tokenized: the encoder must not hold the interpreter."""
    import threading

    turns = 0
    done = threading.Event()

    def other() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    beside = threading.Thread(target=other)
    beside.start()
    tokenizer().encode("The quick brown fox jumps over the lazy dog. " * 5_000)
    done.set()
    beside.join()
    assert turns > 5
