"""Decoder-only models over paged KV."""
