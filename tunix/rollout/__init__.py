"""Sampling: completions and their log-probs from the model that is being trained."""
