"""What all requests of a router share."""

from __future__ import annotations

from dataclasses import dataclass

from router.admission import Admission
from router.live import LiveConfig
from router.metrics import RouterMetrics
from router.recorder import Recorder
from router.retry import CrashList, KeptBytes, RetryBudget
from router.settings import RouterSettings


@dataclass(frozen=True)
class Shared:
    """Limits, memories and books of one router."""

    settings: RouterSettings
    live: LiveConfig
    admission: Admission
    budget: RetryBudget
    kept: KeptBytes
    crashes: CrashList
    recorder: Recorder
    metrics: RouterMetrics
