"""Names of attributes: OpenTelemetry's semantic conventions of one version, and ours under `tandem.`

The conventions for generative AI are still marked as in development, so the version is pinned and goes out with every
span as its schema URL. `tests/tandem/tracing` compares the names with the release of
opentelemetry-semantic-conventions that is installed.
"""

from __future__ import annotations

SEMCONV_VERSION = "1.44.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"
# gen_ai.provider.name of all our spans.
PROVIDER = "tandem"

ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
OUTPUT_TYPE = "gen_ai.output.type"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

REQUEST_ID = "tandem.request_id"
OUTCOME = "tandem.outcome"
ENGINE = "tandem.engine"
ATTEMPT = "tandem.attempt"
ATTEMPTS = "tandem.attempts"
QUEUED_MS = "tandem.queued_ms"
TTFT_MS = "tandem.ttft_ms"
REASON = "tandem.reason"
DRAFTS_PROPOSED = "tandem.draft.proposed_tokens"
DRAFTS_ACCEPTED = "tandem.draft.accepted_tokens"
