"""A model that answers and scores, without a run: a row becomes a prompt, the engine completes it, text comes back."""
