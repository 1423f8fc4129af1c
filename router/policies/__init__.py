"""Routing policies by name."""

from __future__ import annotations

import random

from router.index import PrefixIndex
from router.policies.base import Candidate, Policy, Query
from router.policies.prefix import PrefixApprox, PrefixExact
from router.policies.simple import ConsistentHash, LeastLoad, RoundRobin

__all__ = ["Candidate", "Policy", "Query", "make_policy"]


def make_policy(
    name: str, index: PrefixIndex, rng: random.Random | None = None, prediction_ttl_s: float = 10.0
) -> Policy:
    """Builds a policy.

    Raises:
        ValueError: no policy has this name.
    """
    rng = rng or random.Random()
    if name == "round_robin":
        return RoundRobin()
    if name == "least_load":
        return LeastLoad(rng)
    if name == "consistent_hash":
        return ConsistentHash()
    if name == "prefix_approx":
        return PrefixApprox(rng)
    if name == "prefix_exact":
        return PrefixExact(index, rng, prediction_ttl_s)
    raise ValueError(f"no routing policy {name!r}")
