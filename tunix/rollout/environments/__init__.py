"""Environments: they answer the model between its turns, and may reward the episode."""
