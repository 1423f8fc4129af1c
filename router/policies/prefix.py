"""Policies that look at caches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.index import PredictedBlocks, PrefixIndex, match_depths
from router.load import EngineLoad
from router.policies.base import Candidate, Policy, Query
from router.policies.herd import Herd

# Used until an engine or its peers have measured theirs.
DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
DEFAULT_STEP_S = 0.02
# How long an answer is expected to be; max_tokens is only a bound, and often a wide one.
USUAL_OUTPUT_TOKENS = 256
DEFAULT_CAPACITY_BLOCKS = 32_768
_PARTS = ("queue", "prefill", "batch", "kv", "step", "interference")


def _capacity(engine: EngineLoad) -> int:
    return engine.report.kv_blocks_total or DEFAULT_CAPACITY_BLOCKS


def _depths(query: Query, engines: Sequence[EngineLoad], *sources: PrefixIndex | PredictedBlocks) -> dict[int, int]:
    """Matched blocks by slot; engines of different block sizes are looked up with their own hashes."""
    by_size: dict[int, int] = {}
    for engine in engines:
        by_size[engine.block_size] = by_size.get(engine.block_size, 0) | 1 << engine.slot
    depths: dict[int, int] = {}
    for size, slots in by_size.items():
        depths.update(match_depths(query.hashes(size), slots, *sources))
    return depths


def _usual_rate(engines: Sequence[EngineLoad]) -> float:
    """Median of the measured prefill rates, tokens per second; stands in for engines that have none yet."""
    rates = sorted(engine.report.prefill_tokens_per_s for engine in engines if engine.report.prefill_tokens_per_s > 0)
    return rates[len(rates) // 2] if rates else DEFAULT_PREFILL_TOKENS_PER_S


class PrefixApprox(Policy):
    """The approximate policy of many routers: guess caches from what was routed, mind the load only when it is uneven.

    Longest guessed match wins while it covers at least half of the prompt; else the least loaded. When the load is
    uneven (most loaded over 1.5 times and 16 requests above the least loaded) the least loaded engine wins outright.
    """

    name = "prefix_approx"
    MATCH_SHARE = 0.5
    UNEVEN_RATIO = 1.5
    UNEVEN_REQUESTS = 16

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._predicted = PredictedBlocks()

    def add(self, engine: EngineLoad) -> None:
        self._predicted.remove_engine(engine.slot)
        self._predicted.add_engine(engine.slot)

    def remove(self, engine: EngineLoad) -> None:
        self._predicted.remove_engine(engine.slot)

    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        depths = _depths(query, engines, self._predicted)
        loads = [engine.sequences() for engine in engines]
        low, high = min(loads, default=0), max(loads, default=0)
        uneven = high - low > self.UNEVEN_REQUESTS and high > self.UNEVEN_RATIO * low
        result = []
        for engine, load in zip(engines, loads, strict=True):
            matched = depths.get(engine.slot, 0)
            good = not uneven and matched * engine.block_size >= self.MATCH_SHARE * max(1, query.prompt_tokens)
            result.append(Candidate(engine, matched, cost_s=load - (1e6 * matched if good else 0.0)))
        return result

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        best = min(candidate.cost_s for candidate in candidates)
        return self._rng.choice([candidate for candidate in candidates if candidate.cost_s == best])

    def sent(self, query: Query, chosen: Candidate, now: float) -> None:
        engine = chosen.engine
        self._predicted.touch(engine.slot, query.hashes(engine.block_size), now, _capacity(engine))


class PrefixExact(Policy):
    """Least predicted time, from announced caches and reported load.

    cost = wait for the prompts before it + own uncached prefill + wait for a place in the batch
         + wait for KV blocks + what its prefill takes from the streams that already run there.

    With other routers beside this one the engine that looks best to all of them is no longer the best. Each of its own
    unreported requests then stands for those of all routers, and it judges only a random sample of the fleet, the
    smaller the more routers there are (Mitzenmacher, "How useful is old information?", 2000: a few random choices beat
    the minimum of stale loads). Engines that hold much of the prompt are judged beside the sample if that saves more
    than the others' work that nobody has reported yet; as they are no random choice, that work is counted as theirs.
    """

    name = "prefix_exact"
    # Costs within this share (and this many seconds) of the best are ties; a random one of them is taken, so that
    # routers that see the same reports do not all pick the same engine.
    TIE_SHARE = 0.02
    TIE_S = 0.01
    # What a second of prefill is charged for the work it takes from others: those who will come to the same engine
    # while it lasts, and every stream that runs there and waits for its next token.
    WORK = 1.0
    INTERFERENCE = 0.03
    # Most engines that are judged for one request, and how much faster than the number of routers that falls.
    JUDGE_MOST = 64
    SPREAD = 5

    def __init__(self, index: PrefixIndex, rng: random.Random, prediction_ttl_s: float) -> None:
        self._index = index
        self._rng = rng
        self._predicted = PredictedBlocks()
        self._ttl_s = prediction_ttl_s
        self._expired_at = 0.0
        self._usual = DEFAULT_PREFILL_TOKENS_PER_S
        self._usual_at = float("-inf")
        self._herd = Herd()

    def add(self, engine: EngineLoad) -> None:
        self._predicted.remove_engine(engine.slot)
        self._predicted.add_engine(engine.slot)

    def remove(self, engine: EngineLoad) -> None:
        self._predicted.remove_engine(engine.slot)

    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        if now - self._expired_at > self._ttl_s / 10:
            self._expired_at = now
            for engine in engines:
                if engine.events_live:
                    self._predicted.expire(engine.slot, now - self._ttl_s)
        depths = _depths(query, engines, self._index, self._predicted)
        if now - self._usual_at > 1.0:
            self._usual_at, self._usual = now, _usual_rate(engines)
        self._herd.update(engines, now)
        holders, others = self._shortlist(engines, depths)
        unseen = self._herd.unseen_tokens
        return [
            *(self._judge(query, engine, depths[engine.slot], now, unseen) for engine in holders),
            *(self._judge(query, engine, depths.get(engine.slot, 0), now) for engine in others),
        ]

    def _shortlist(
        self, engines: Sequence[EngineLoad], depths: dict[int, int]
    ) -> tuple[Sequence[EngineLoad], Sequence[EngineLoad]]:
        """Who is judged: engines that hold most of the prompt (at most half), and a random sample of the others."""
        count = max(2, min(len(engines), self.JUDGE_MOST) // (self.SPREAD * (self._herd.size - 1) + 1))
        if count >= len(engines):
            return (), engines
        unseen, rng = self._herd.unseen_tokens, self._rng
        held = [(depths[e.slot], rng.random(), e) for e in engines if depths.get(e.slot, 0) * e.block_size > unseen]
        held.sort(key=lambda entry: entry[:2], reverse=True)
        holders = [entry[2] for entry in held[: (count + 1) // 2]]
        taken = {engine.slot for engine in holders}
        others = [engine for engine in engines if engine.slot not in taken]
        return holders, rng.sample(others, count - len(holders))

    def _judge(
        self, query: Query, engine: EngineLoad, matched: int, now: float, unseen_tokens: float = 0.0
    ) -> Candidate:
        report = engine.report
        rate = report.prefill_tokens_per_s or self._usual
        size = engine.block_size or 1
        pending, sequences, kv_blocks = engine.view(now, self._herd.size)
        pending += unseen_tokens
        # The last prompt token is always computed.
        uncached = max(1, query.prompt_tokens - matched * size)
        prefill = uncached / rate
        queue = pending / rate
        service = USUAL_OUTPUT_TOKENS * (report.decode_step_s or DEFAULT_STEP_S)
        batch = kv = 0.0
        places = report.max_num_seqs or sequences + 1
        if sequences >= places:
            batch = (sequences + 1 - places) * service / places
        if report.kv_blocks_total:
            output = min(query.max_tokens, USUAL_OUTPUT_TOKENS)
            lack = kv_blocks + (query.prompt_tokens + output) // size + 1 - matched - report.kv_blocks_total
            if lack > 0:
                # Blocks come back when a request ends: at the earliest the next one, and as many as it takes.
                kv = service * max(lack / report.kv_blocks_total, 1 / (sequences + 1))
        interference = prefill * (self.WORK + self.INTERFERENCE * min(sequences, places))
        predicted = queue + prefill + batch + kv + report.decode_step_s
        parts = (queue, prefill, batch, kv, report.decode_step_s, interference)
        return Candidate(engine, matched, predicted, predicted + interference, parts, _PARTS)

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        best = min(candidate.cost_s for candidate in candidates)
        limit = best * (1 + self.TIE_SHARE) + self.TIE_S
        return self._rng.choice([candidate for candidate in candidates if candidate.cost_s <= limit])

    def sent(self, query: Query, chosen: Candidate, now: float) -> None:
        engine = chosen.engine
        self._predicted.touch(engine.slot, query.hashes(engine.block_size), now, _capacity(engine))
