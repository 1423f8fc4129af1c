"""All that a service must know to turn text into a model's tokens and back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer as plain data; fields as in the contract's GetTokenizerResponse."""

    tokenizer_json: bytes
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    named_templates: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE2b-128 over all fields."""
        state = hashlib.blake2b(self.tokenizer_json, digest_size=16)
        rest = [
            self.chat_template,
            sorted(self.special_tokens.items()),
            list(self.stop_token_ids),
            list(self.special_token_ids),
            sorted(self.named_templates.items()),
            self.add_bos,
        ]
        state.update(json.dumps(rest).encode())
        return state.hexdigest()

    def to_proto(self) -> pb.GetTokenizerResponse:
        from tandem.inference.v1 import inference_pb2 as pb

        return pb.GetTokenizerResponse(
            digest=self.digest,
            tokenizer_json=self.tokenizer_json,
            chat_template=self.chat_template,
            special_tokens=self.special_tokens,
            stop_token_ids=self.stop_token_ids,
            special_token_ids=self.special_token_ids,
            named_templates=self.named_templates,
            add_bos=self.add_bos,
        )

    @classmethod
    def from_proto(cls, message: pb.GetTokenizerResponse) -> TokenizerBundle:
        """Raises ValueError if the digest does not fit the contents."""
        bundle = cls(
            tokenizer_json=message.tokenizer_json,
            chat_template=message.chat_template,
            special_tokens=dict(message.special_tokens),
            stop_token_ids=tuple(message.stop_token_ids),
            special_token_ids=tuple(message.special_token_ids),
            named_templates=dict(message.named_templates),
            add_bos=message.add_bos,
        )
        if message.digest and message.digest != bundle.digest:
            raise ValueError(f"tokenizer digest is {bundle.digest}, but the message says {message.digest}")
        return bundle

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "tokenizer_json": self.tokenizer_json.decode(),
                "chat_template": self.chat_template,
                "special_tokens": self.special_tokens,
                "stop_token_ids": self.stop_token_ids,
                "special_token_ids": self.special_token_ids,
                "named_templates": self.named_templates,
                "add_bos": self.add_bos,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TokenizerBundle:
        raw = json.loads(data)
        return cls(
            tokenizer_json=raw["tokenizer_json"].encode(),
            chat_template=raw["chat_template"],
            special_tokens=raw["special_tokens"],
            stop_token_ids=tuple(raw["stop_token_ids"]),
            special_token_ids=tuple(raw["special_token_ids"]),
            named_templates=raw["named_templates"],
            add_bos=raw["add_bos"],
        )
