"""`tunix plan`: what a recipe's programs need of devices that need not be here, asked of their compilers.

A recipe -> `subject.py` (its model, without a download, and what a run holds in memory, as shapes) -> `record.py` (one
step of its algorithm, with a client that lowers each program of `programs.py` instead of running it; `arithmetic.py`
says what it costs at the least) -> `verdict.py` (the memory of each by its compiler, kept by digest: what fits, and how
fast it could be). `worker.py` does all that in a process of its own for `ask.py`, and looks for the smallest change
that fits.
"""
