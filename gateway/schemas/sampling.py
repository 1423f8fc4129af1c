"""Fields that every text endpoint takes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gateway.schemas.base import STORE, Body, Int, Part, extension, no_effect

MAX_STOPS = 64
MAX_STOP_BYTES = 1024


class StreamOptions(Part):
    """How a stream reports usage."""

    include_usage: bool | None = Field(None, description="send a last chunk with the usage")
    continuous_usage_stats: bool | None = extension("Send the usage so far with every chunk.")
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """response_format of the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema needs json_schema.schema")
        return self


class StructuredOutputs(Part):
    """vLLM's structured_outputs: exactly one of these."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=10_000)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class SamplingBody(Body):
    """Sampling, stopping and output options under OpenAI's and vLLM's names."""

    model: str | None = Field(None, description="served name; may be left out if one model is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = Field(None, ge=1, description="choices per prompt")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    max_tokens: Int | None = Field(None, ge=0, le=2**31 - 1)
    user: Any = no_effect()
    store: bool | None = Field(None, description=STORE)
    metadata: Any = no_effect()
    service_tier: Any = no_effect()
    prompt_cache_key: Any = no_effect()
    prompt_cache_retention: Any = no_effect()
    safety_identifier: Any = no_effect()
    prediction: Any = no_effect()
    response_format: ResponseFormat | None = None

    top_k: Int | None = extension("Keep the k likeliest tokens; 0 or -1 keeps all.", ge=-1, lt=2**31)
    min_p: float | None = extension("Keep tokens of at least this share of the likeliest's probability.", ge=0, le=1)
    repetition_penalty: float | None = extension("Over 1 makes seen tokens unlikelier.", gt=0, le=100)
    min_tokens: Int | None = extension("No stop token before so many tokens.", ge=0, lt=2**31)
    ignore_eos: bool | None = extension("Go on past the model's end tokens.")
    stop_token_ids: list[Int] | None = extension("Further token ids that end the text.", max_length=1024)
    include_stop_str_in_output: bool | None = extension("Leave the matched stop string in the text.")
    skip_special_tokens: bool | None = extension("false leaves special tokens in the text.")
    allowed_token_ids: list[Int] | None = extension("Only these ids may be sampled.", min_length=1)
    bad_words: list[str] | None = extension("Texts that may not appear.", max_length=1024)
    prompt_logprobs: Int | None = extension("Alternatives per prompt token.", ge=0, le=20)
    return_token_ids: bool | None = extension("Return prompt and output token ids.")
    truncate_prompt_tokens: Int | None = extension("Keep the last so many prompt tokens; -1: what fits.", ge=-1)
    priority: Int | None = extension("Lower is sooner.", ge=-(2**31), lt=2**31)
    cache_salt: str | None = extension("Isolates the prefix cache.", min_length=1, max_length=1024)
    structured_outputs: StructuredOutputs | None = extension("Constrain the text: json, regex, choice, grammar …")
    guided_json: dict[str, Any] | bool | str | None = extension("JSON schema for the text.")
    guided_regex: str | None = extension("Regular expression for the text.")
    guided_choice: list[str] | None = extension("The text is one of these.", min_length=1)
    guided_grammar: str | None = extension("Lark grammar for the text.")
    receipt: bool | None = extension("Return what the answer cost and why.")

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> list[str] | None:
        if value is None:
            return None
        stops = [value] if isinstance(value, str) else value
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
        for stop in stops:
            if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
                raise ValueError(f"a stop string has 1 to {MAX_STOP_BYTES} bytes")
        return stops

    @model_validator(mode="after")
    def _options_need_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
