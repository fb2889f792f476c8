"""Writes the hardware lines of recipes, and that column of their table, from what the compilers said.

    python docs/make_hardware.py                        the lines, from docs/hardware.json
    python docs/make_hardware.py --plan sft_qwen ...    plans these recipes again first (all without names)

A plan needs `pip install '.[plan-gpu,plan-tpu]'`; nothing else does. A test compares the lines with the file, and a
slow test the file with new plans, so neither can fall behind.
"""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from tunix.commands.plan import ask
from tunix.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
FOUND = Path(__file__).with_name("hardware.json")
TABLE = ROOT / "docs/guide/recipes.md"
HEAD = "# Hardware   "
WIDTH = 120
GIB = 2**30
HERE = ("quickstart", "sft_pydoc", "dpo_pydoc")
"""Recipes for a laptop: their lines were measured."""
ONE = ("h100:1",)
"""Topologies that a recipe is planned for unless TARGETS says others."""
EIGHT = ("h100:8",)
TARGETS = {
    "sft_llama_70b": ("v5p:8x8x8", "h100:256"),
    "grpo_llama_70b": ("v5p:8x8x8", "h100:256"),
    "sft_qwen_64k": ("h100:1", "v5p:1x1x1"),
    "sft_qwen3_moe": EIGHT,
    "dpo_qwen3_moe": EIGHT,
    "grpo_qwen3_moe": EIGHT,
}
NAMES = {"h100": "H100 (80 GB)", "h200": "H200 (141 GB)", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}


def planned(names: list[str]) -> None:
    """Plans recipes for their topologies and writes what was found."""
    known = json.loads(FOUND.read_text()) if FOUND.is_file() else {}
    for name in names:
        recipe = Recipe.load(ROOT / "recipes" / f"{name}.yaml")
        for topology in TARGETS.get(name, ONE):
            known.setdefault(name, {})[topology] = plan_of(recipe, topology)
            FOUND.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            print(f"{name}, {topology}: {phrase(topology, known[name][topology])}", flush=True)


def plan_of(recipe: Recipe, topology: str) -> dict[str, Any]:
    """What the recipe needs there at the most over its stages: GiB, of how many, during which program."""
    found = ask(recipe, topology, deadline=3600, remedies=False)
    assert found.verdicts, f"{topology}: no plan within an hour"
    most = max(found.verdicts, key=lambda one: one["needed"] / one["limit"])
    return {
        "needed": round(most["needed"] / GIB, 1),
        "limit": round(most["limit"] / GIB, 1),
        "during": most["programs"][0]["name"],
        "fits": found.fits,
    }


def phrase(topology: str, found: dict[str, Any]) -> str:
    """One topology in words: `one H100 (80 GB): 18.8 of the 68.5 GiB that programs may take, in the step`."""
    chip, _, shape = topology.partition(":")
    number = 1
    for size in re.findall(r"\d+", shape):
        number *= int(size)
    who = f"one {NAMES[chip]}" if number == 1 else f"{number} x {NAMES[chip]}"
    fits = "" if found["fits"] else "does not fit "
    return f"{fits}{who}: {found['needed']} of {found['limit']} GiB each, during {found['during']}"


def line_of(name: str, known: dict[str, Any]) -> str:
    """The hardware paragraph of a recipe's header."""
    words = "; or ".join(phrase(topology, found) for topology, found in known[name].items() if found["fits"])
    wrapped = textwrap.wrap(
        f"{words}, by `tunix plan`.", WIDTH, initial_indent=HEAD, subsequent_indent="#" + " " * (len(HEAD) - 1)
    )
    return "\n".join(wrapped) + "\n"


def cell_of(name: str, known: dict[str, Any]) -> str:
    """The hardware column of a recipe in their table."""
    topology, found = next((topology, found) for topology, found in known[name].items() if found["fits"])
    return phrase(topology, found).partition(" GiB")[0].rpartition(" of ")[0] + " GiB"


def files(known: dict[str, Any]) -> dict[Path, str]:
    """Every file that has such lines, as it should be."""
    wanted: dict[Path, str] = {}
    table = TABLE.read_text()
    for name in known:
        path = ROOT / "recipes" / f"{name}.yaml"
        old = re.compile(rf"^{HEAD}.*\n(#            .*\n)*", re.M)
        wanted[path] = old.sub(line_of(name, known), path.read_text(), count=1)
        row = re.compile(rf"^(\| \[{name}\]\([^|]*\|[^|]*\|)[^|]*\|", re.M)
        table = row.sub(rf"\1 {cell_of(name, known)} |", table)
    return {**wanted, TABLE: table}


def main() -> None:
    """Plans what is named, then writes all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", nargs="*", metavar="RECIPE", help="recipes to plan again; all of them without a name")
    arguments = parser.parse_args()
    if arguments.plan is not None:
        every = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
        planned(arguments.plan or [name for name in every if name not in HERE])
    for path, text in files(json.loads(FOUND.read_text())).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
