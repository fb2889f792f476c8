"""Sampling: prompts in, completions with log-probs and rewards out, packed for the update."""
