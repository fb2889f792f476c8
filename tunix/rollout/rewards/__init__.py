"""Rewards: plain functions of prompts and completions, run in worker processes with a deadline."""
