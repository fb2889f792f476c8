"""Supervised fine-tuning: the log-likelihood of given tokens."""
