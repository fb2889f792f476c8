"""What a compiled program costs, read from its text: operations, memory traffic and what devices send each other.

`hlo.py` reads the text into instructions; `account.py` adds them up.
"""
