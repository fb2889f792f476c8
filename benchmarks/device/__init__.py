"""One command for a real device: `python -m benchmarks.device`. docs/devices/README.md says how to use it.

`__main__.py` runs the parts of `parts.py`, each in a process of its own with a deadline, and writes what they found
(`report.py`) after each of them. A part yields rows (`rows.py`): checks (`parity.py`, `checks.py`, `resume.py`), then
speeds (`speeds.py`).
"""
