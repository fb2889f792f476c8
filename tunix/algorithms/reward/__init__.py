"""Reward models: a scalar head that is trained on pairs of completions."""
