"""Tandem's tools over the Model Context Protocol, with the protocol's own client.

pip install mcp
python examples/mcp_client.py "Your question"
"""

from __future__ import annotations

import asyncio
import os
import sys

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TANDEM_API_KEY", "")


async def show(done: float, total: float | None, message: str | None) -> None:
    print(message or "", end="", flush=True)


async def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Name three colours of the rainbow."
    headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
    http = httpx2.AsyncClient(headers=headers, timeout=300)
    async with http, Client(streamable_http_client(f"{URL}/mcp", http_client=http)) as client:
        tools = await client.list_tools()
        print("tools:", ", ".join(tool.name for tool in tools.tools))
        arguments = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
        answer = await client.call_tool("chat", arguments, progress_callback=show)
        if answer.is_error:
            sys.exit(f"error: {answer.content[0].text}")
        result = answer.structured_content
        print(f"\n[{result['prompt_tokens']} prompt tokens, {result['completion_tokens']} written]")


if __name__ == "__main__":
    asyncio.run(main())
