"""Why a model cannot be had."""

from __future__ import annotations


class ModelError(RuntimeError):
    """A model that cannot be found, fetched or trusted: the message says what was found and what is needed."""
