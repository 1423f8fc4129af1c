"""From request fields to the Generate contract: sampling, stopping, grammar, and the context's arithmetic."""

from __future__ import annotations

import json
from typing import Any

import orjson

from gateway.client import LoadedTokenizer
from gateway.errors import ApiError, bad
from gateway.schemas.sampling import SamplingBody
from tandem.inference.v1 import inference_pb2 as pb

# The engine's range is (0, 1]; OpenAI's has 0, which keeps the likeliest token alone, as any tiny share does.
TINY_TOP_P = 1e-9


def sampling_params(body: SamplingBody, loaded: LoadedTokenizer, vocab_size: int) -> pb.SamplingParams:
    """Raises ApiError for ids outside the vocabulary and words without tokens."""
    params = pb.SamplingParams()
    if body.temperature is not None:
        params.temperature = body.temperature
    if body.top_p is not None:
        params.top_p = body.top_p or TINY_TOP_P
    if body.top_k is not None:
        params.top_k = max(body.top_k, 0)
    if body.min_p is not None:
        params.min_p = body.min_p
    if body.seed is not None:
        params.seed = body.seed % 2**64
    if body.repetition_penalty is not None:
        params.repetition_penalty = body.repetition_penalty
    if body.frequency_penalty is not None:
        params.frequency_penalty = body.frequency_penalty
    if body.presence_penalty is not None:
        params.presence_penalty = body.presence_penalty
    for key, value in (body.logit_bias or {}).items():
        params.logit_bias[_bias_id(key, vocab_size)] = _bias_value(key, value)
    if body.allowed_token_ids:
        params.allowed_token_ids.extend(check_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids"))
    for ids in _bad_words(body.bad_words or [], loaded):
        params.bad_words.append(pb.TokenIds(ids=ids))
    return params


def _bias_id(key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
        raise bad(
            f"logit_bias has the key {key[:40]!r}, but keys are token ids from 0 to {vocab_size - 1}.", "logit_bias"
        )
    return int(key)


def _bias_value(key: str, value: float) -> float:
    if not -100 <= value <= 100:
        raise bad(f"logit_bias of token {key} is {value}, but it must be from -100 to 100.", "logit_bias")
    return value


def check_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Raises ApiError for an id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise bad(f"{param} holds the token id {wrong}, but ids are from 0 to {vocab_size - 1}.", param)
    return ids


def _bad_words(words: list[str], loaded: LoadedTokenizer) -> list[list[int]]:
    """Each word as it stands, and as it stands after a space (most vocabularies spell the two differently)."""
    result: list[list[int]] = []
    for word in words:
        if not word:
            raise bad("bad_words holds an empty text.", "bad_words")
        for text in (word, " " + word.lstrip()):
            ids = loaded.tokenizer.encode(text)
            if ids and ids not in result:
                result.append(ids)
    return result


def stop_conditions(body: SamplingBody, max_tokens: int | None, vocab_size: int) -> pb.StopConditions:
    stop = pb.StopConditions(stop=body.stops)
    if max_tokens is not None:
        stop.max_tokens = max_tokens
    if body.min_tokens is not None:
        if max_tokens is not None and body.min_tokens > max_tokens:
            raise bad(f"min_tokens is {body.min_tokens}, but max_tokens is {max_tokens}.", "min_tokens")
        stop.min_tokens = body.min_tokens
    if body.stop_token_ids:
        stop.stop_token_ids.extend(check_ids(body.stop_token_ids, vocab_size, "stop_token_ids"))
    if body.ignore_eos is not None:
        stop.ignore_eos = body.ignore_eos
    if body.include_stop_str_in_output is not None:
        stop.include_stop_str_in_output = body.include_stop_str_in_output
    return stop


def fit_context(prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> int:
    """Output tokens that the request may have.

    Raises:
        ApiError: 400 with both numbers when prompt and output do not fit.
    """
    room = max_model_len - prompt_tokens
    wanted = 1 if max_tokens is None else max_tokens
    if wanted <= room and room >= 0:
        return room if max_tokens is None else max_tokens
    asked = f"{prompt_tokens} in the {param}" + (f", {max_tokens} for the completion" if max_tokens is not None else "")
    raise ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{prompt_tokens + wanted} tokens ({asked}). Please reduce the length of the {param} or of the completion.",
        param=param if prompt_tokens >= max_model_len else "max_tokens",
        code="context_length_exceeded",
    )


def truncated(ids: list[int], keep: int | None, max_model_len: int, max_tokens: int | None) -> list[int]:
    """The last `keep` ids; -1 keeps what fits beside max_tokens (at least one token of output)."""
    if keep is None:
        return ids
    if keep == 0:
        raise bad("truncate_prompt_tokens is 0, but it must be -1 or at least 1.", "truncate_prompt_tokens")
    limit = max(1, max_model_len - (max_tokens or 1)) if keep == -1 else keep
    return ids[-limit:]


def _schema_text(schema: Any, param: str) -> str:
    """A JSON schema as JSON text. Raises ApiError for what is none."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise bad(f"{param} is not valid JSON: {error}.", param, "invalid_grammar") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise bad(f"{param} must be a JSON schema that something can match.", param, "invalid_grammar")
    return json.dumps(schema, ensure_ascii=False)


def structured_output(body: SamplingBody) -> pb.StructuredOutput | None:
    """The one constraint that a request states, from response_format, structured_outputs or guided_*.

    Raises:
        ApiError: more than one is given.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if body.guided_json is not None:
        found.append(("guided_json", {"json_schema": _schema_text(body.guided_json, "guided_json")}))
    if body.guided_regex is not None:
        found.append(("guided_regex", {"regex": body.guided_regex}))
    if body.guided_choice is not None:
        found.append(("guided_choice", {"choice": pb.ChoiceList(options=body.guided_choice)}))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", {"grammar": body.guided_grammar}))
    found += _structured_outputs(body)
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", {"json_object": True}))
    elif form is not None and form.type == "json_schema" and form.json_schema is not None:
        found.append(("response_format", {"json_schema": _schema_text(form.json_schema.schema_, "response_format")}))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise bad(f"Only one constraint is possible, but the request has {names}.", found[1][0])
    return pb.StructuredOutput(**found[0][1]) if found else None


def _structured_outputs(body: SamplingBody) -> list[tuple[str, dict[str, Any]]]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    found: list[dict[str, Any]] = []
    if wanted.json_ is not None:
        found.append({"json_schema": _schema_text(wanted.json_, "structured_outputs")})
    if wanted.regex is not None:
        found.append({"regex": wanted.regex})
    if wanted.choice is not None:
        found.append({"choice": pb.ChoiceList(options=wanted.choice)})
    if wanted.grammar is not None:
        found.append({"grammar": wanted.grammar})
    if wanted.json_object:
        found.append({"json_object": True})
    if wanted.structural_tag is not None:
        found.append({"structural_tag": _schema_text(wanted.structural_tag, "structured_outputs")})
    if len(found) != 1:
        raise bad(
            f"structured_outputs holds {len(found)} constraints, but exactly one is needed: "
            "json, regex, choice, grammar, json_object or structural_tag.",
            "structured_outputs",
        )
    return [("structured_outputs", found[0])]
