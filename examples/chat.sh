#!/bin/sh
# One chat by curl, first whole, then streamed:  examples/chat.sh "Your question"
set -eu
url=${TANDEM_URL:-http://127.0.0.1:8000}
question=${1:-Name three colours of the rainbow.}
models=$(curl -fsS "$url/v1/models") || { echo "Nobody serves at $url: start 'make serve', or set TANDEM_URL." >&2; exit 1; }
model=$(printf '%s' "$models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
body=$(python3 -c '
import json, sys
model, question, stream = sys.argv[1:]
message = {"role": "user", "content": question}
print(json.dumps({"model": model, "max_tokens": 64, "temperature": 0, "messages": [message], "stream": stream == "1"}))
' "$model" "$question" 0)
curl -fsS "$url/v1/chat/completions" -H 'content-type: application/json' -d "$body"
echo
curl -fsSN "$url/v1/chat/completions" -H 'content-type: application/json' \
    -d "$(printf '%s' "$body" | sed 's/"stream": false/"stream": true/')"
