"""`tunix plan`: what a recipe's programs need of devices that need not be here, asked of their compilers.

A recipe -> `structure.py` (its model, without a download) -> `subject.py` (what a run holds in memory, as shapes) ->
`record.py` (one step of its algorithm, with a client that lowers each program instead of running it) -> `verdict.py`
(memory and exchanges of each, kept by digest: what fits, and how fast it could be; `hlo.py` and `account.py` read
programs). `worker.py` does all that in a process of its own for `ask.py`, and looks for the smallest change that fits.
"""
