"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gateway.schemas.base import Int, extension, refused
from gateway.schemas.prompts import Prompts
from gateway.schemas.sampling import SamplingBody


class CompletionBody(SamplingBody):
    """A legacy completion request."""

    prompt: Prompts = Field(description="text, token ids, or a list of either; each prompt gets its own choices")
    best_of: Int | None = Field(None, ge=1, description="sample so many and return the n likeliest per token")
    echo: bool | None = None
    logprobs: Int | None = Field(None, ge=0, le=20)
    suffix: Any = refused("this model cannot fill in the middle")
    add_special_tokens: bool | None = extension("Add the bos token if the tokenizer has one (default true).")

    @model_validator(mode="after")
    def _together(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of must not be below n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of above n cannot be streamed")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens 0 needs echo or prompt_logprobs")
        return self
