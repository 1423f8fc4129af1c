"""A completion over gRPC, straight from a router or an engine.

python examples/grpc_client.py ADDRESS "The beginning of a text"

ADDRESS is host:port or unix:/path; `tandem serve` prints those of its router and engines.
"""

from __future__ import annotations

import asyncio
import sys

from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc


async def main(address: str, text: str) -> None:
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        models = await stub.ListModels(pb.ListModelsRequest())
        print(f"model: {models.models[0].name}")
        request = pb.GenerateRequest(
            model=models.models[0].name,
            text=text,
            sampling=pb.SamplingParams(temperature=0),
            stop=pb.StopConditions(max_tokens=32),
        )
        async for response in stub.Generate(request):
            for event in response.events:
                kind = event.WhichOneof("event")
                if kind == "delta":
                    print(event.delta.text, end="", flush=True)
                elif kind == "usage":
                    print(f"\n[{event.usage.prompt_tokens} prompt tokens, {event.usage.completion_tokens} written]")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"))
