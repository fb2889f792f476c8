"""A tiny model that was trained to judge by a rule agrees with it: from a folder, and as the base of an adapter."""

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import tunix
from tests.rollout.test_judging import SAMPLED
from tests.tiny_models import one_device
from tests.tiny_runs import train, write_recipe, write_rows
from tunix.data.config import DataConfig
from tunix.data.types import Prompt
from tunix.hf.source import pretrained
from tunix.models.config import is_own
from tunix.protocols import Sampler
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.rewards.rubric import read_rubric
from tunix.run.judges import judges_of
from tunix.trainer.perf import Compilations

RUBRIC = "- at: it has the sign.\n"
LONGEST = 520


def by_rule(text: str) -> float:
    return float("@" in text)


def texts(number: int, seed: int) -> list[str]:
    """Short texts, half of which have the sign somewhere."""
    rng = np.random.default_rng(seed)
    made = ["".join(rng.choice([*"abcdefgh "], int(rng.integers(4, 12)))) for _ in range(number)]
    return [x if i % 2 else f"{x[: (at := int(rng.integers(len(x))))]}@{x[at:]}" for i, x in enumerate(made)]


@pytest.mark.slow
def test_a_trained_judge_agrees_with_its_rule(tmp_path: Path):
    (tmp_path / "rubric.md").write_text(RUBRIC)
    rubric = read_rubric("rubric.md", (0.0, 1.0))
    rows = []
    for text in texts(512, 0):
        verdict = json.dumps({"at": {"score": int(by_rule(text)), "reason": ""}})
        rows.append({"prompt": rubric.question("abc>", text) + "\n", "completion": verdict})
    write_rows(tmp_path / "verdicts.jsonl", rows)
    changes = {"data.train": "verdicts.jsonl", "data.max_length": LONGEST, "steps": 300, "output": "judge"}
    train(str(write_recipe(tmp_path / "judge.yaml", changes)), "optimizer.learning_rate=3e-3")
    section = {"model": "judge", "rubric": "rubric.md", "max_tokens": 48}
    data = DataConfig(train="rows", max_length=32)
    (judge,) = judges_of(
        RewardConfig.model_validate({"judge": section}), pretrained("judge"), data, "float32", one_device()
    )
    held_out = texts(64, 1)
    prompts = [Prompt(np.array([1]), "abc>", {"prompt": "abc>"})] * len(held_out)
    made = judge.begin(prompts, [SAMPLED] * len(held_out), held_out)()
    assert np.mean([x.score == by_rule(text) for x, text in zip(made, held_out, strict=True)]) > 0.9
    compilations = Compilations()
    judge.begin(prompts[:3], [SAMPLED] * 3, ["new", "n@w", "@"])()
    assert compilations.since_warmup == 0
    # The base under an adapter is the same judge, whatever the adapter has become.
    client = tunix.client("judge", adapter={"rank": 4}, length=64)
    client.sampler.publish({name: x + 1 if is_own(name) else x for name, x in client.learner.params.items()}, 1)
    sampler: Future[Sampler] = Future()
    sampler.set_result(client.sampler)
    rewards = RewardConfig.model_validate({"judge": {**section, "model": "base"}})
    (base,) = judges_of(rewards, pretrained("judge"), data, "float32", one_device(), None, sampler)
    again = base.begin(prompts, [SAMPLED] * len(held_out), held_out)()
    assert [x.score for x in again] == [x.score for x in made]
