"""A chat with OpenAI's own client: only the base URL differs.

pip install openai
python examples/openai_chat.py "Your question"
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Name three colours of the rainbow."
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        # What OpenAI's API does not have goes here.
        extra_body={"top_k": 40},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} written]")


if __name__ == "__main__":
    main()
