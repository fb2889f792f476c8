"""Decoder-only language models: one text for all families, Hugging Face folders in and out."""
