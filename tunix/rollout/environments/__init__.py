"""Environments: what answers the model between its turns, and what its play is worth."""
