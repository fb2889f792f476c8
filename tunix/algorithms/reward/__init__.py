"""Reward models: config, loss, class."""
