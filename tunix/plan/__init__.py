"""`tunix plan`: what a recipe's programs need of devices that need not be here, asked of their compilers.

A recipe -> `subject.py` (its model, without a download, and what a run holds in memory, as shapes) -> `record.py` (one
step of its algorithm, with a client that lowers each program of `programs.py` instead of running it; `arithmetic.py`
says what it costs at the least) -> `worker.py` (in a process of its own: the memory of each by its compiler, what fits,
how fast it could be, and the smallest change that fits). `commands/plan.py` starts the worker and prints what it says.
"""
