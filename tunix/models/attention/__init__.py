"""Attention: one call for training, prefill and decoding, and a file for each way of computing it.

`inputs.py` says what attention reads besides q, k and v, `attend.py` has the call and the table of implementations, and
each other file is one of these.
"""
