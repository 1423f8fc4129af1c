"""A stand-in for a service: python fake_service.py PARENT_PID SERVICE ADDRESS BEHAVIOUR.

Speaks grpc.health.v1 on a Unix socket, or HTTP for the gateway. Behaviours: good, never (dies before it serves),
dies (serves, then dies soon), deaf (ignores SIGINT and SIGTERM), parent (starts a child of its own).
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.launcher.guard import die_with_parent


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(address: str) -> None:
    if address.startswith("http://"):
        port = int(address.rpartition(":")[2])
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return
    rpc = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, rpc)
    rpc.add_insecure_port(address)
    rpc.start()
    globals()["_keep"] = rpc


def main() -> None:
    parent, _service, address, behaviour = sys.argv[1:5]
    die_with_parent(int(parent))
    if behaviour == "never":
        print("no model here: cannot start", file=sys.stderr)
        sys.exit(3)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if behaviour == "deaf" else lambda *_: stop.set())
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"grandchild {child.pid}", file=sys.stderr, flush=True)
    serve(address)
    print(f"serving {os.getpid()}", file=sys.stderr, flush=True)
    if behaviour == "dies":
        time.sleep(0.4)
        print("something broke", file=sys.stderr, flush=True)
        os._exit(7)
    stop.wait()


if __name__ == "__main__":
    main()
