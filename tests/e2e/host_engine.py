"""The mock engine as a process of its own on a "host": with a tokenizer for gateways, and SIGTERM as real ones take it.

python -m tests.e2e.host_engine --listen 0.0.0.0:50051 --name e0
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import Any

from tandem.engine.v1 import engine_pb2 as epb
from tandem.inference.v1 import inference_pb2 as pb
from tests.gateway.mock_router import bundle
from tests.router.harness import until
from tests.router.mock_engine import MockConfig, MockEngine


class HostEngine(MockEngine):
    """Deterministic tokens; the tokenizer is the default model's, whose ids are never needed for the text."""

    def info(self) -> pb.ModelInfo:
        info = super().info()
        info.tokenizer_digest = bundle().digest
        return info

    async def GetTokenizer(self, request: Any, context: Any) -> pb.GetTokenizerResponse:
        return bundle().to_proto()

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; what runs has `grace_s` seconds, then it ends UNAVAILABLE / ENGINE_DRAINING."""
        self.state = epb.ENGINE_STATE_DRAINING
        with contextlib.suppress(AssertionError):
            await until(lambda: not self.running + self.waiting, grace_s)
        self.draining.set()
        await until(lambda: not self.running + self.waiting)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--grace-s", type=float, default=1.0)
    options = parser.parse_args()
    engine = HostEngine(options.listen, MockConfig(step_s=options.step_s, tokenizer_digest=bundle().digest))
    await engine.start()
    engine.address = options.name
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    await engine.drain(options.grace_s)
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
