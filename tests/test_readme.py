"""The README is true: its recipe and its Python run as they stand, its commands parse, and every link leads somewhere.

The blocks are taken in order, in one folder and one namespace, as a reader would type them. A block that opens with
`# name` is that file. The one thing that is replaced is the hub id: tests have no network, so a folder stands there.
"""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

import tunix
from tunix.cli import COMMANDS
from tunix.lora.config import AdapterConfig
from tunix.recipe.recipe import Recipe
from tunix.trainer.config import OptimizerConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALGORITHMS = ("sft", "dpo", "kto", "reward", "grpo", "ppo", "distill")
DOCS = ("docs/recipe.md", "docs/kernels.md")
PAGES = ("README.md", *DOCS, *(f"tunix/algorithms/{name}/README.md" for name in ALGORITHMS))
HUB_ID = "Qwen/Qwen3-0.6B"


def blocks(language: str) -> list[str]:
    """The text of every fenced block of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def named(block: str) -> str | None:
    """The file that a block is, where its first line says so."""
    found = re.match(r"# ([\w.]+\.(?:py|yaml))\n", block)
    return found[1] if found else None


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 folder in place of the hub's."""
    words = ["steps=1", "eval.samples=0", f"output={tmp_path_factory.mktemp('small')}/run"]
    export = tunix.train("sft_qwen", words, tiny=True).export
    assert export is not None
    return export


@pytest.fixture
def checkout(small: Path, tmp_path: Path) -> Path:
    """A folder with the recipes and the files of the README; what stands in place of the hub's."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name, row in zip(("rows", "pairs"), blocks("json"), strict=True):
        json.loads(row)
        (tmp_path / f"{name}.jsonl").write_text(row * 8)
    (sums,) = re.findall(r"train: sums.jsonl +# (\{.*\}) a line", README)
    (tmp_path / "sums.jsonl").write_text(f"{sums}\n" * 8)
    for block in blocks("yaml") + blocks("python"):
        if name := named(block):
            (tmp_path / name).write_text(block.replace(HUB_ID, str(small)))
    return small


@pytest.mark.filterwarnings("ignore:.*base layer.*:UserWarning")
def test_what_it_shows_runs(checkout: Path, tmp_path: Path):
    recipe = Recipe.load(tmp_path / "my_run.yaml", ["epochs=1", "batch_size=4", "data.max_length=128"])
    assert recipe.adapter is not None
    assert tunix.train(recipe).folder == Path("runs/my_run")
    told: dict[str, object] = {}
    for block in blocks("python"):
        if named(block) is None:
            exec(compile(block.replace(HUB_ID, str(checkout)), "README.md", "exec"), told)
    assert type(told["model"]).__name__ == "PeftModelForCausalLM"
    assert Path("runs/sft_pydoc-tiny/export/config.json").is_file()
    rows = [json.loads(line) for line in Path("runs/dft/metrics.jsonl").read_text().splitlines()]
    # Every token of a vocabulary of V is weighted by about 1/V at first: log(V) / V, not log(V).
    assert 0 < rows[0]["eval/loss"] < 0.5
    assert told["tunix"] is tunix


@pytest.mark.slow  # tests/algorithms/test_subclass.py trains by the same class
def test_its_rewards_and_its_grpo_run(checkout: Path, tmp_path: Path):
    plain = Recipe.load(tmp_path / "by_reward.yaml")
    assert plain.algorithm.name == "grpo"
    result = tunix.train(tmp_path / "by_reward.yaml", ["algorithm.name=my_grpo.py:MyGRPO"])
    assert [row["step"] for row in result.metrics] == [1, 2]  # one epoch of eight rows, four at a time
    for row in result.metrics:
        assert 0 <= row["reward/short"] <= 1
        assert row["reward/failed"] == 0
        assert row["loss/entropy"] == pytest.approx(-0.01 * row["policy/entropy"], rel=1e-5)
    assert (result.folder / "curves.svg").is_file()


@pytest.mark.slow
def test_its_preferences_run(checkout: Path, tmp_path: Path):
    result = tunix.train(tmp_path / "by_preference.yaml", ["batch_size=4"])
    assert [row["step"] for row in result.metrics] == [1, 2]  # one epoch of eight rows, four at a time
    # The margin of two equal models is 0 in bfloat16 too: -log sigmoid(0) = ln 2.
    assert result.metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert {"rewards/accuracy", "rewards/margin"} <= result.metrics[0].keys()


def test_its_adapters_are_ours():
    found = re.findall(r"`(adapter|optimizer): (\{[^`]+\})`", README)
    assert len(found) >= 10
    for section, values in found:
        kind = {"adapter": AdapterConfig, "optimizer": OptimizerConfig}[section]
        assert kind.model_validate(yaml.safe_load(values))


def test_its_commands_are_ours():
    called = re.findall(r"^(?:\| `)?tunix (\w+)", README, re.MULTILINE)
    assert len(called) >= 8
    assert set(called) <= COMMANDS.keys()
    assert all(f"`tunix {name} " in README for name in COMMANDS)


def test_every_recipe_is_in_the_table():
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"| [{path.stem}](recipes/{path.name}) |" in README


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]
    broken = [link for link in links if not ((ROOT / page).parent / link.partition("#")[0]).exists()]
    assert not broken
    assert not re.search(r"\bQ[A-Z]{4,}\b|SCREEN", text), "a number was never filled in"
