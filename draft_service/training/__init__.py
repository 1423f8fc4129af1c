"""Draft training: the target writes its own conversations, and a table of its habits is distilled from them."""

from draft_service.training.main import main

__all__ = ["main"]
