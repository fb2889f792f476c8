"""Decoder-only language models: one implementation for all families, for training, prefill and decoding."""
