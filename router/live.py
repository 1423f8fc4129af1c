"""The few routing settings that may change while the router runs."""

from __future__ import annotations

from dataclasses import dataclass

from router.settings import RouterSettings


@dataclass
class LiveConfig:
    """Starts from the settings; UpdateRoutingConfig changes it until the next start."""

    max_retries: int
    stall_limit_s: float
    max_queued: int

    @classmethod
    def of(cls, settings: RouterSettings) -> LiveConfig:
        return cls(settings.max_retries, settings.stall_limit_s, settings.max_queued)
