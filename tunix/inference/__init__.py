"""Inference without a run: renders rows as prompts, completes them with the engine, and scores given rows."""
