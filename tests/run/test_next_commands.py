"""What a run ends with: the commands that people run next, each of which parses, finds the run and fits the model."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tunix.cli import COMMANDS
from tunix.recipe.recipe import Recipe
from tunix.run.train import next_commands

REQUIRED = {"model": {"path": "a/b"}, "data": {"train": "rows.jsonl"}, "steps": 3, "output": "x"}


def recipe(**sections: Any) -> Recipe:
    return Recipe.build({**REQUIRED, **sections})


HELD_OUT = {"data": {"train": "rows.jsonl", "eval": "held.jsonl"}}
CASES: dict[str, tuple[Recipe, bool, list[str]]] = {
    "completions": (recipe(), True, ["chat", "eval ROWS", "export"]),
    "held-out rows": (recipe(**HELD_OUT), True, ["chat", "eval", "export"]),
    "a split": (recipe(data={"train": "a/b", "eval_split": "test"}), True, ["chat", "eval", "export"]),
    "token ids": (recipe(**HELD_OUT), False, ["eval", "export"]),
    "a reward model": (recipe(**HELD_OUT, algorithm={"name": "reward"}), True, ["eval", "export"]),
    "an adapter": (recipe(adapter={"rank": 4}), True, ["chat", "eval ROWS", "export"]),
}


@pytest.mark.parametrize("run", [Path("runs/x"), Path("/my runs/it's")], ids=str)
@pytest.mark.parametrize(("trained", "chats", "names"), CASES.values(), ids=CASES)
def test_only_what_works_is_proposed_and_parses(run: Path, trained: Recipe, chats: bool, names: list[str]):
    title, *lines = next_commands(trained, run, chats=chats)
    assert title == "next:"
    proposed = []
    for line in lines:
        command, use = line.strip().rsplit("  ", 1)
        tunix, name, *words = shlex.split(command)
        assert tunix == "tunix"
        parsed = vars(COMMANDS[name].parsed(name, words))
        assert Path(parsed["run"] if name == "export" else parsed["model"]) == run
        proposed.append(f"{name} ROWS" if parsed.get("data") else name)
        assert use
    assert proposed == names
