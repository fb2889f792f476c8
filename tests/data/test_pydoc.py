"""The rows of sft_pydoc: many, the same in every process, and no held-out answer among the trained ones."""

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tunix.data import pydoc


def test_many_and_disjoint():
    train, held_out = pydoc.train(), pydoc.held_out()
    assert len(train) + len(held_out) >= 2500
    assert 0.07 < len(held_out) / (len(train) + len(held_out)) < 0.13
    assert not {row["completion"] for row in train} & {row["completion"] for row in held_out}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    prompts = [row["prompt"] for row in train]
    assert prompts == sorted(prompts)
    # An evaluation reads the first rows only: they have to be of all kinds.
    assert len({row["prompt"].split(".")[0] for row in held_out[:100]}) > 30
    assert all(row["prompt"].endswith("\n") and row["completion"].strip() for row in train + held_out)


def test_examples():
    rows = {row["prompt"].split("(")[0]: row for row in pydoc.train() + pydoc.held_out()}
    assert rows["heapq.heappop"] == {
        "prompt": "heapq.heappop(heap, /)\n",
        "completion": "Pop the smallest item off the heap, maintaining the heap invariant.",
    }
    assert rows["json.dumps"]["completion"] == "Serialize ``obj`` to a JSON formatted ``str``."
    assert rows["textwrap.dedent"]["prompt"] == "textwrap.dedent(text)\n"


def test_nothing_of_this_machine_or_process():
    for row in pydoc.train() + pydoc.held_out():
        assert not re.search(r" at 0x[0-9a-f]+>|\{'|/home/|/root/", row["prompt"]), row
        assert sys.prefix not in row["prompt"]


def test_same_in_another_process_whatever_was_patched(monkeypatch):
    def patched(self):
        """Something that a library added to the standard library."""

    monkeypatch.setattr(logging.Logger, "patched", patched, raising=False)
    pydoc._rows.cache_clear()
    here = pydoc.train()
    script = "import json; from tunix.data import pydoc; print(json.dumps(pydoc.train()))"
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(pydoc.__file__).parents[2])}
    there = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=environment)
    assert json.loads(there.stdout) == here


def test_pairs_of_a_function_and_another_ones_line():
    train, held_out = pydoc.pairs(), pydoc.held_out_pairs()
    own = {row["prompt"]: row["completion"] for row in pydoc.train() + pydoc.held_out()}
    for rows, split in ((train, pydoc.train()), (held_out, pydoc.held_out())):
        assert all(own[row["prompt"]] == row["chosen"] != row["rejected"] for row in rows)
        assert {row[side] for row in rows for side in ("chosen", "rejected")} <= {row["completion"] for row in split}
    # Nearly every function has all of its pairs; those that fell on the same line as their own have one fewer.
    assert 0.98 * pydoc.OTHERS < len(train) / len(pydoc.train()) <= pydoc.OTHERS
    assert 0.95 < len(held_out) / len(pydoc.held_out()) <= 1
    assert len({(row["prompt"], row["rejected"]) for row in train}) > 0.99 * len(train)


def test_a_line_by_itself_tells_nothing():
    # Each stands once for its function and once for another; where both are the same line, for neither.
    chosen, rejected = (Counter(row[side] for row in pydoc.pairs()) for side in ("chosen", "rejected"))
    assert chosen == rejected
