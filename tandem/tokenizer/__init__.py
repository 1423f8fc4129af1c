"""Tokenizers as data (TokenizerBundle, what GetTokenizer sends) and at work (Tokenizer, IncrementalDetokenizer)."""

from tandem.tokenizer.bundle import TokenizerBundle
from tandem.tokenizer.detokenizer import IncrementalDetokenizer
from tandem.tokenizer.loading import TokenizerError, load_bundle
from tandem.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerBundle", "TokenizerError", "load_bundle"]
