"""What more devices, more processes and sampling beside learning give, and cost: `python -m benchmarks.scale`.

`__main__.py` runs the parts that are named: `runs.py` (losses, seconds and bytes of runs on more devices and in more
processes, of the recipes in `tiny.py`), `exchanges.py` (what their devices send, and what for), `handover.py` (weights
on their way to a sampler), `overlap.py` (the real buffer between a sampler and a learner that sleep), `simulation.py`
(long-tailed rollouts on many slots, without a clock) and `arithmetic.py` (what of it can be computed without
simulating).
"""
