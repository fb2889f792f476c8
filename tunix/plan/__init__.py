"""`tunix plan`: what a recipe's programs need of devices that need not be here, asked of their compilers.

A recipe -> `structure.py` (its model, without a download) -> `subject.py` (what a run holds in memory, as shapes) ->
`record.py` (one step of its algorithm, with a client that lowers each program instead of running it) -> `compiling.py`
(memory and cost of each, kept by digest; `hlo.py` and `account.py` read programs) -> `verdict.py` (what fits, and how
fast it could be) -> `remedies.py` (the smallest change that fits). `worker.py` does all that in a process of its own
for `ask.py`.
"""
