"""Decoder-only language models: one text for all families, for training, prefill and decoding."""
