"""The quickstart's problems: right answers, four splits that share nothing, the same in every process."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from tunix.data import sorting

SPLITS = {name: getattr(sorting, name)() for name in sorting.SIZES}


def test_six_distinct_letters_and_their_order():
    assert {name: len(rows) for name, rows in SPLITS.items()} == {
        "demonstrations": 4000,
        "problems": 20_000,
        "validation": 256,
        "held_out": 512,
    }
    for rows in SPLITS.values():
        for row in rows:
            letters = row["prompt"].removesuffix(">")
            assert len(letters) == len(set(letters)) == 6
            assert letters.isascii()
            assert letters.islower()
            assert row == {"prompt": f"{letters}>", "completion": "".join(sorted(letters))}


def test_no_problem_is_in_two_splits_or_twice_in_one():
    prompts = {name: {row["prompt"] for row in rows} for name, rows in SPLITS.items()}
    assert all(len(prompts[name]) == len(SPLITS[name]) for name in SPLITS)
    assert not [pair for pair in combinations(prompts, 2) if prompts[pair[0]] & prompts[pair[1]]]


def test_the_same_in_another_process():
    script = "import json; from tunix.data import sorting; print(json.dumps(sorting.held_out()))"
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(sorting.__file__).parents[2])}
    there = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=environment)
    assert json.loads(there.stdout) == SPLITS["held_out"]
