"""The router's view of the fleet and its decisions as plain dicts: for the live page, `tandem top` and scripts."""

from __future__ import annotations

from typing import Any

from tandem.router.v1 import router_pb2 as rpb

_ENGINE_COUNTERS = (
    "output_tokens",
    "prefill_tokens",
    "cached_tokens",
    "drafts_proposed",
    "drafts_accepted",
    "preemptions",
    "steps",
)
_ENGINE_GAUGES = (
    "running",
    "waiting",
    "uncached_waiting_tokens",
    "kv_blocks_used",
    "kv_blocks_total",
    "kv_blocks_cached",
    "prefill_tokens_per_s",
    "decode_step_ms",
    "longest_step_ms",
    "draft_acceptance",
    "max_num_seqs",
    "max_waiting",
    "rss_bytes",
)


def state_name(state: int) -> str:
    """ready, draining … for a FleetState."""
    return rpb.FleetState.Name(state).removeprefix("FLEET_STATE_").lower()  # type: ignore[arg-type]


def short_name(address: str) -> str:
    """engine-0 for a socket of that name; other addresses stay as they are."""
    if address.startswith("unix:"):
        return address.rsplit("/", 1)[-1].removesuffix(".sock")
    return address


def share(part: float, whole: float) -> float | None:
    """part / whole from 0 to 1; None where nothing was counted."""
    return part / whole if whole else None


def engine_dict(view: rpb.EngineView) -> dict[str, Any]:
    """One engine. Load values are None before its first report; shares run from 0 to 1; the epoch is hexadecimal."""
    reported = view.HasField("load")
    load = view.load
    result: dict[str, Any] = {
        "address": view.address,
        "name": short_name(view.address),
        "state": state_name(view.state),
        "in_flight": view.in_flight,
        "report_age_ms": view.report_age_ms if reported else None,
        "consecutive_failures": view.consecutive_failures,
        # The router's breaker: a suspect engine is only probed.
        "breaker": "open" if view.state == rpb.FLEET_STATE_SUSPECT else "closed",
        "last_error": view.last_error,
        "indexed_blocks": view.indexed_blocks,
        "events_live": view.events_live,
        "epoch": f"{load.epoch:016x}" if reported else None,
        "model": load.model.name if reported else None,
        "numerics_id": load.model.numerics_id if reported else None,
        "batch_invariant": load.model.batch_invariant if reported else None,
    }
    for name in (*_ENGINE_GAUGES, *_ENGINE_COUNTERS):
        result[name] = getattr(load, name) if reported else None
    result["kv_use"] = share(load.kv_blocks_used, load.kv_blocks_total) if reported else None
    prompt = load.cached_tokens + load.prefill_tokens
    result["hit_rate"] = share(load.cached_tokens, prompt) if reported else None
    result["acceptance"] = share(load.drafts_accepted, load.drafts_proposed) if reported else None
    return result


def fleet_dict(answer: rpb.ListEnginesResponse) -> dict[str, Any]:
    """The whole fleet."""
    return {
        "engines": [engine_dict(view) for view in answer.engines],
        "queued": answer.queued,
        "shed": answer.shed,
    }


def decision_dict(decision: rpb.RouteDecision) -> dict[str, Any]:
    """One routing decision with everything that was considered."""
    return {
        "request_id": decision.request_id,
        "unix_ms": decision.unix_ms,
        "policy": decision.policy,
        "chosen": decision.chosen,
        "name": short_name(decision.chosen),
        "reason": decision.reason,
        "prompt_tokens": decision.prompt_tokens,
        "cached_tokens": decision.actual_cached_tokens if decision.HasField("actual_cached_tokens") else None,
        "outcome": decision.outcome,
        "queued_ms": round(decision.queued_ms, 2),
        "ttft_ms": round(decision.ttft_ms, 2) if decision.HasField("ttft_ms") else None,
        "attempt": decision.attempt,
        "candidates": [
            {
                "address": one.address,
                "name": short_name(one.address),
                "matched_blocks": one.matched_blocks,
                "predicted_ms": round(one.predicted_ms, 2),
                "parts": {name: round(value, 3) for name, value in one.parts.items()},
                "excluded": one.excluded,
            }
            for one in decision.candidates
        ],
    }


def token_rates(now: dict[str, Any], before: dict[str, Any], seconds: float) -> dict[str, float]:
    """Output tokens per second by engine address between two fleets; an engine that restarted counts from 0."""
    old = {engine["address"]: engine for engine in before["engines"]}
    rates = {}
    for engine in now["engines"]:
        if engine["output_tokens"] is None:
            continue
        last = old.get(engine["address"])
        base = last["output_tokens"] or 0 if last and last["epoch"] == engine["epoch"] else 0
        rates[engine["address"]] = max(0, engine["output_tokens"] - base) / seconds
    return rates
