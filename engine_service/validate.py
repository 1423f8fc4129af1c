"""Checks every field of a request and gives it its meaning. Pure; refuses with the field's name, never clamps."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_service.text import StopRules
from tandem.errors import TandemError, invalid
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.types import SamplingParams

MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine allows."""

    vocab_size: int
    max_model_len: int
    max_n: int
    max_logprobs: int
    model_stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What an earlier stream of this request had reached for one choice."""

    ids: tuple[int, ...] = ()
    text_bytes_sent: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Validated:
    """A request that can run."""

    prompt: list[int]
    params: SamplingParams
    rules: StopRules
    n: int
    max_output: int
    score_prompt: bool
    resumed: tuple[Resumed, ...]


def _number(field: str, value: float, low: float, high: float, limit: str, *, open_low: bool = False) -> float:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise invalid(field, value, f"must be {limit}")
    return value


def _ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    found = tuple(ids)
    if found and max(found) >= vocab_size:
        worst = next(token for token in found if token >= vocab_size)
        raise invalid(field, worst, f"token ids must be below the vocabulary size, {vocab_size}")
    return found


def _text(field: str, value: str) -> None:
    if len(value.encode()) > MAX_NAME_BYTES:
        raise invalid(field, value, f"must have at most {MAX_NAME_BYTES} bytes")


def check_envelope(request: pb.GenerateRequest) -> None:
    """Fields that do not depend on the prompt's tokens."""
    for field in ("request_id", "cache_salt", "tenant", "model"):
        _text(field, getattr(request, field))
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt", None, "token_ids or text must be set")
    if request.HasField("structured"):
        _structured(request.structured)


def _structured(structured: pb.StructuredOutput) -> None:
    kind = structured.WhichOneof("kind")
    if kind is None:
        raise invalid("structured", None, "one kind must be set")
    if kind == "choice":
        if not structured.choice.options:
            raise invalid("structured.choice.options", [], "must have at least one option")
        if any(not option for option in structured.choice.options):
            raise invalid("structured.choice.options", "", "options must not be empty")
    elif not getattr(structured, kind):
        raise invalid(f"structured.{kind}", getattr(structured, kind), "must be set to something")


def _sampling(sampling: pb.SamplingParams, vocab_size: int) -> dict[str, object]:
    def given(name: str, default: float) -> float:
        return getattr(sampling, name) if sampling.HasField(name) else default

    bias = tuple(sorted(sampling.logit_bias.items()))
    _ids("sampling.logit_bias", (token for token, _value in bias), vocab_size)
    for token, value in bias:
        _number(f"sampling.logit_bias[{token}]", value, -100, 100, "from -100 to 100")
    words = tuple(_ids("sampling.bad_words", word.ids, vocab_size) for word in sampling.bad_words)
    if len(words) > MAX_BAD_WORDS:
        raise invalid("sampling.bad_words", len(words), f"at most {MAX_BAD_WORDS} words are allowed")
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise invalid("sampling.bad_words", list(word), f"each must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
    repetition = given("repetition_penalty", 1.0)
    _number("sampling.repetition_penalty", repetition, 0, 1e6, "greater than 0 and at most 1e6", open_low=True)
    top_k = int(given("top_k", 0))
    return {
        "temperature": _number("sampling.temperature", given("temperature", 1.0), 0, 2, "from 0 to 2"),
        "top_k": 0 if top_k >= vocab_size else top_k,
        "top_p": _number("sampling.top_p", given("top_p", 1.0), 0, 1, "greater than 0 and at most 1", open_low=True),
        "min_p": _number("sampling.min_p", given("min_p", 0.0), 0, 1, "from 0 to 1"),
        "seed": sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        "repetition_penalty": repetition,
        "frequency_penalty": _number(
            "sampling.frequency_penalty", given("frequency_penalty", 0.0), -2, 2, "from -2 to 2"
        ),
        "presence_penalty": _number("sampling.presence_penalty", given("presence_penalty", 0.0), -2, 2, "from -2 to 2"),
        "logit_bias": bias,
        "allowed_token_ids": tuple(
            sorted(set(_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)))
        ),
        "bad_words": words,
    }


def _stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise invalid("stop.stop", len(stops), f"at most {MAX_STOPS} stop strings are allowed")
    for stop in stops:
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            raise invalid("stop.stop", stop, f"each must have 1 to {MAX_STOP_BYTES} bytes")
    return tuple(dict.fromkeys(stops))


def _prompt(request: pb.GenerateRequest, ids: Sequence[int], limits: Limits) -> list[int]:
    prompt = list(_ids("token_ids", ids, limits.vocab_size))
    if request.HasField("truncate_prompt_tokens"):
        keep = request.truncate_prompt_tokens
        if not 1 <= keep <= limits.max_model_len:
            raise invalid("truncate_prompt_tokens", keep, f"must be from 1 to {limits.max_model_len}")
        prompt = prompt[-keep:]
    if not prompt:
        raise invalid(request.WhichOneof("prompt") or "prompt", "", "the prompt must have at least one token")
    return prompt


def _max_output(stop: pb.StopConditions, prompt_len: int, limits: Limits) -> int:
    """Most output tokens; what the context leaves, if not told."""
    room = limits.max_model_len - prompt_len
    wanted = stop.max_tokens if stop.HasField("max_tokens") else max(1, room)
    if wanted > room:
        raise TandemError(
            "CONTEXT_LENGTH",
            f"the prompt has {prompt_len} tokens and {wanted} output tokens are asked for, "
            f"but the context holds {limits.max_model_len}",
            prompt_tokens=prompt_len,
            max_tokens=wanted,
            max_model_len=limits.max_model_len,
        )
    if stop.min_tokens > wanted:
        raise invalid("stop.min_tokens", stop.min_tokens, f"must be at most max_tokens, {wanted}")
    return wanted


def _alternatives(output: pb.OutputOptions, field: str, limits: Limits) -> int | None:
    if not output.HasField(field):  # type: ignore[arg-type]
        return None
    value = int(getattr(output, field))
    if value > limits.max_logprobs:
        raise invalid(f"output.{field}", value, f"must be at most {limits.max_logprobs}")
    return value


def _resumed(request: pb.GenerateRequest, n: int, prompt_len: int, max_output: int, vocab: int) -> tuple[Resumed, ...]:
    found = [Resumed() for _ in range(n)]
    if not request.HasField("resume"):
        return tuple(found)
    state = request.resume
    if state.prompt_tokens not in (0, prompt_len):
        raise invalid("resume.prompt_tokens", state.prompt_tokens, f"the prompt has {prompt_len} tokens")
    seen: set[int] = set()
    for choice in state.choices:
        if choice.index >= n or choice.index in seen:
            raise invalid("resume.choices.index", choice.index, f"must be below n = {n} and appear once")
        seen.add(choice.index)
        ids = _ids("resume.choices.emitted_ids", choice.emitted_ids, vocab)
        if len(ids) > max_output:
            raise invalid("resume.choices.emitted_ids", len(ids), f"at most max_tokens = {max_output} can be there")
        found[choice.index] = Resumed(ids, choice.text_bytes_sent, choice.finished)
    return tuple(found)


def validate(request: pb.GenerateRequest, prompt_ids: Sequence[int], limits: Limits) -> Validated:
    """Checks all fields.

    Raises:
        TandemError: INVALID_FIELD or CONTEXT_LENGTH.
    """
    check_envelope(request)
    stop, output = request.stop, request.output
    sampling = _sampling(request.sampling, limits.vocab_size)
    stop_ids = _ids("stop.stop_token_ids", stop.stop_token_ids, limits.vocab_size)
    stops = _stop_strings(stop.stop)
    logprobs = _alternatives(output, "logprobs", limits)
    prompt_logprobs = _alternatives(output, "prompt_logprobs", limits)
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= limits.max_n:
        raise invalid("n", n, f"must be from 1 to {limits.max_n}")
    prompt = _prompt(request, prompt_ids, limits)
    max_output = _max_output(stop, len(prompt), limits)
    resumed = _resumed(request, n, len(prompt), max_output, limits.vocab_size)
    own = () if stop.ignore_eos else limits.model_stop_ids
    params = SamplingParams(
        **sampling,  # type: ignore[arg-type]
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(sorted({*limits.model_stop_ids, *stop_ids})),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    rules = StopRules(
        stop_ids=frozenset((*own, *stop_ids)),
        stops=stops,
        include=stop.include_stop_str_in_output,
        min_tokens=stop.min_tokens,
        skip_special=not output.keep_special_tokens,
    )
    scored = prompt_logprobs is not None and not any(choice.ids or choice.finished for choice in resumed)
    return Validated(prompt, params, rules, n, max_output, scored, resumed)
