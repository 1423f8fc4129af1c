"""A simulated engine: continuous batching with chunked prefill over a paged LRU prefix cache.

Time of one step = base + prompt tokens / prefill rate + sequences × per-sequence time. Between events nothing is
stepped: a prefill of several chunks, or a stretch of decode steps in which nobody comes or goes, is one event.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.traces import TraceRequest
from router.load import LoadReport


@dataclass(frozen=True)
class ServiceModel:
    """Calibration of an engine. Rates in tokens per second, times in seconds, KV in tokens."""

    name: str
    prefill_rate: float
    step_s: float
    step_per_sequence_s: float
    chunk_tokens: int
    max_num_seqs: int
    max_waiting: int
    kv_tokens: int


MODELS = {
    # Round figures of an 8B model in bf16 on one current data-centre GPU.
    "gpu-8b": ServiceModel("gpu-8b", 16_000, 0.009, 0.00012, 4096, 128, 4, 400_000),
    # The 135M model on two CPU cores: decode 3 ms and 0.55 ms per sequence, prefill as measured for the linears.
    "cpu-135m": ServiceModel("cpu-135m", 1_300, 0.003, 0.00055, 512, 32, 2, 60_000),
}


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request on its way through the simulation."""

    trace: TraceRequest
    keys: list[bytes]
    deadline: float
    router: int = 0
    first_at: float = -1.0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    # Bookkeeping of whoever holds it.
    left: int = 0
    private_blocks: int = 0
    held: int = 0
    token: object = None


class SimEngine:
    """One engine. `run(now)` does what is due and returns when it must be called next (inf if idle)."""

    def __init__(
        self,
        model: ServiceModel,
        block_tokens: int,
        stored: Callable[[list[bytes]], None],
        removed: Callable[[list[bytes]], None],
        first_token: Callable[[SimRequest, float], None],
        done: Callable[[SimRequest, float, bool], None],
        slow: float = 1.0,
    ) -> None:
        self.model = model
        self.block = block_tokens
        self.total_blocks = max(1, model.kv_tokens // block_tokens)
        self._slow = slow
        self._stored, self._removed, self._first, self._done = stored, removed, first_token, done
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self._refs: dict[bytes, int] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()
        self._private = 0
        self._prefilling: list[SimRequest] = []
        self._prefill_tokens = 0
        self._segment_at = 0.0
        self._segment_end = math.inf
        self._segment_steps = 0
        self._rate = 0.0
        self.prefilled_tokens = 0
        self.taken_tokens = 0
        self.busy_s = 0.0

    # -- load

    def report(self, now: float) -> LoadReport:
        queued = sum(request.trace.input_length - self._match(request) for request in self.waiting)
        if self._prefilling:
            share = (self._segment_end - now) / max(1e-9, self._segment_end - self._segment_at)
            queued += int(self._prefill_tokens * min(1.0, max(0.0, share)))
        return LoadReport(
            epoch=1,
            running=len(self.running) + len(self._prefilling),
            waiting=len(self.waiting),
            uncached_tokens=queued,
            kv_blocks_used=len(self._refs) + self._private,
            kv_blocks_total=self.total_blocks,
            prefill_tokens_per_s=self._rate,
            decode_step_s=self._step_s(),
            max_num_seqs=self.model.max_num_seqs,
            max_waiting=self.model.max_waiting,
            taken_tokens=self.taken_tokens,
        )

    def _step_s(self) -> float:
        model = self.model
        return self._slow * (model.step_s + model.step_per_sequence_s * len(self.running))

    def full(self) -> bool:
        total = len(self.running) + len(self._prefilling) + len(self.waiting)
        return total >= self.model.max_num_seqs + self.model.max_waiting

    # -- work

    def add(self, request: SimRequest, now: float) -> float:
        self.waiting.append(request)
        if not self._prefilling:
            self._interrupt_decode(now)
        return self.run(now)

    def run(self, now: float) -> float:
        """Finishes the segment that is due and starts the next. Returns its end."""
        if now >= self._segment_end - 1e-12:
            self._finish_segment(now)
        if self._segment_end == math.inf:
            self._start_segment(now)
        return self._segment_end

    def _interrupt_decode(self, now: float) -> None:
        """A newcomer ends a stretch of decoding at the end of the step in progress."""
        if self._segment_end == math.inf or not self._segment_steps:
            return
        step = (self._segment_end - self._segment_at) / self._segment_steps
        steps = min(self._segment_steps, math.ceil((now - self._segment_at) / step - 1e-9))
        self._segment_steps = steps
        self._segment_end = self._segment_at + steps * step

    def _finish_segment(self, now: float) -> None:
        steps, self._segment_end = self._segment_steps, math.inf
        self.busy_s += now - self._segment_at
        still = []
        for request in self.running:
            request.left -= steps
            if request.left > 0:
                still.append(request)
            else:
                self._release(request)
                self._done(request, now, True)
        self.running = still
        if self._prefilling:
            duration = now - self._segment_at
            rate = self._prefill_tokens / max(1e-9, duration)
            if self._prefill_tokens >= 256:
                self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
            self.prefilled_tokens += self._prefill_tokens
            for request in self._prefilling:
                self.taken_tokens += request.trace.input_length
                self._stored(request.keys)
                request.first_at = now
                self._first(request, now)
                request.left = request.trace.output_length - 1
                if request.left > 0:
                    self.running.append(request)
                else:
                    self._release(request)
                    self._done(request, now, True)
            self._prefilling, self._prefill_tokens = [], 0

    def _start_segment(self, now: float) -> None:
        self._segment_at = now
        self._admit(now)
        model = self.model
        if self._prefilling:
            steps = max(1, math.ceil(self._prefill_tokens / model.chunk_tokens))
            seconds = self._prefill_tokens / model.prefill_rate + steps * (
                model.step_s + model.step_per_sequence_s * len(self.running)
            )
            self._segment_steps = steps
            self._segment_end = now + self._slow * seconds
        elif self.running:
            self._segment_steps = min(request.left for request in self.running)
            self._segment_end = now + self._segment_steps * self._step_s()

    def _admit(self, now: float) -> None:
        """Takes the head of the queue, and further prompts while they fit in one chunk with it."""
        while self.waiting:
            request = self.waiting[0]
            if now > request.deadline:
                self.waiting.popleft()
                self._done(request, now, False)
                continue
            if len(self.running) + len(self._prefilling) >= self.model.max_num_seqs:
                return
            matched = self._match(request)
            uncached = request.trace.input_length - matched
            if self._prefilling and self._prefill_tokens + uncached > self.model.chunk_tokens:
                return
            if not self._allocate(request):
                return
            self.waiting.popleft()
            request.cached_tokens = matched
            self._prefilling.append(request)
            self._prefill_tokens += uncached

    # -- blocks

    def _match(self, request: SimRequest) -> int:
        """Cached tokens of a prompt now; the last token is always computed."""
        depth = 0
        for key in request.keys:
            if key not in self._refs and key not in self._free:
                break
            depth += 1
        return min(depth * self.block, request.trace.input_length - 1)

    def _allocate(self, request: SimRequest) -> bool:
        """Reserves all blocks that the request can need."""
        total = -(-(request.trace.input_length + request.trace.output_length) // self.block)
        keys = request.keys
        private = max(0, total - len(keys))
        fresh = sum(1 for key in keys if key not in self._refs and key not in self._free)
        from_free = sum(1 for key in keys if key in self._free)
        used = len(self._refs) + self._private
        if used + fresh + from_free + private > self.total_blocks:
            return False
        for key in keys:
            count = self._refs.get(key, 0)
            if not count:
                self._free.pop(key, None)
            self._refs[key] = count + 1
        self._private += private
        request.private_blocks = private
        evicted = []
        while len(self._refs) + self._private + len(self._free) > self.total_blocks:
            evicted.append(self._free.popitem(last=False)[0])
        if evicted:
            self._removed(evicted)
        return True

    def _release(self, request: SimRequest) -> None:
        self._private -= request.private_blocks
        # The end of a chain is forgotten before its beginning.
        for key in reversed(request.keys):
            count = self._refs[key] - 1
            if count:
                self._refs[key] = count
            else:
                del self._refs[key]
                self._free[key] = None
