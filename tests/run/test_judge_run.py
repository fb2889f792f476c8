"""Runs that learn from a judge: on a server, killed and resumed; in pairs; the base of an adapter; what is refused."""

import json
import re
from pathlib import Path

import pytest

from tests.fake_judge import FakeJudge, served, write_rubric
from tests.marks import slow
from tests.run.test_kill import Run, assert_same_end, no_process_left
from tests.tiny_rl import write_policy, write_prompts
from tests.tiny_runs import lines, metrics, model_folder, train, write_rows
from tunix.cli import main

ROOT = Path(__file__).parents[2]
JUDGE = {"rubric": "rubric.md", "deadline": 1.0}


def policy(folder: Path, url: str, **changes) -> str:
    write_rubric(folder)
    write_prompts(folder, "abc>", "bcd>", "cde>", "def>")
    return str(
        write_policy(folder, **{"reward": {"judge": {"model": url, **JUDGE}}, "data__eval": "held.jsonl", **changes})
    )


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 2
    return " ".join(capsys.readouterr().err.split())


def trained(run: str | Path) -> list[dict]:
    return [row for row in metrics(run) if "train/loss" in row]


@pytest.mark.slow
def test_a_policy_learns_from_a_judge_and_verdicts_that_are_there_are_not_asked_for(tmp_path):
    """The second run finds half of the first one's verdicts, the last of them cut short, as a kill leaves them."""
    fake = FakeJudge()
    with served(fake) as url:
        train(recipe := policy(tmp_path, url), "output=whole")
        asked, kept = len(fake.bodies), Path("whole/judge.jsonl").read_text().splitlines(keepends=True)
        assert len(kept) == asked == len({body["messages"][0]["content"] for body in fake.bodies})
        (tmp_path / "run").mkdir()
        (tmp_path / "run/recipe.yaml").write_text(Path("whole/recipe.yaml").read_text())
        half = len(kept) // 2
        (tmp_path / "run/judge.jsonl").write_text("".join(kept[:half]) + kept[half][:20])
        fake.bodies.clear()
        train(recipe)
    assert len(fake.bodies) == asked - half
    assert sorted(Path("run/judge.jsonl").read_text().splitlines(keepends=True)) == sorted(kept)
    assert len(trained("run")) == 3
    for row, other in zip(trained("run"), trained("whole"), strict=True):
        for name in ("train/loss", "reward/mean", "reward/judge", "reward/judge/capitals", "reward/judge/short"):
            assert row[name] == other[name]
        assert row["reward/failed"] == 0
        assert row["reward/judge"] == pytest.approx((3 * row["reward/judge/capitals"] + 1) / 4, abs=1e-3)
        assert row["compile/count"] == 0
        assert row["perf/judge_cached"] >= other["perf/judge_cached"]
    assert any("eval/reward" in row for row in metrics("run"))
    samples = [row for row in lines(Path("run/samples.jsonl")) if "rewards" in row]
    assert samples[0]["logged"]["judge"]["short"] == {"score": 1, "reason": "y"}


@pytest.mark.slow
def test_a_judge_that_dies_ends_the_run_with_a_line_and_a_checkpoint(tmp_path, capsys):
    with served(FakeJudge(dies_after=40)) as url:
        said = refused(capsys, "run", policy(tmp_path, url, steps=9, data__eval=None))
    assert "samples of a step could be scored, the first because judge did not answer in 1 s (the last time" in said
    assert "What was trained before is saved" in said
    assert any((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_is_judged_ends_as_if_nobody_had(tmp_path):
    """Of verdicts that were there none is asked for again; those on their way are."""
    fake = FakeJudge(delay=0.02)
    with served(fake) as url, no_process_left() as runs:
        for name in ("whole", "killed"):
            (tmp_path / name).mkdir()
            policy(tmp_path / name, url, steps=6, checkpoint={"every": 2})
        runs.append(Run(tmp_path / "whole"))
        assert runs[-1].wait() == 0, runs[-1].log
        asked = len(fake.bodies)
        fake.bodies.clear()
        runs.append(killed := Run(tmp_path / "killed"))
        killed.until(lambda: killed.steps >= 3 and fake.at_once > 0)
        killed.kill()
        kept = (tmp_path / "killed/run/judge.jsonl").read_text().count("\n")
        fake.bodies.clear()
        runs.append(again := Run(tmp_path / "killed"))
        assert again.wait() == 0, again.log
    assert len(fake.bodies) == asked - kept
    assert_same_end(again.run, tmp_path / "whole/run")


@pytest.mark.slow
def test_dpo_learns_from_pairs_that_a_judge_compares(tmp_path):
    """Of each pair the better one scores 1 and the other 0; where the orders disagree, it is left out and counted."""
    fake = FakeJudge()
    with served(fake) as url:
        algorithm = {"name": "dpo", "online": True, "group_size": 2}
        reward = {"judge": {"model": url, "pairwise": True, **JUDGE}}
        recipe = policy(tmp_path, url, algorithm=algorithm, reward=reward, data__eval=None, steps=2)
        train(recipe)
        rows = [row for row in metrics("run") if "reward/mean" in row]
        assert len(rows) == 2
        assert all(row["reward/mean"] == 0.5 for row in rows)  # of each pair 1 and 0, or twice 0.5
        assert all(row["reward/judge/ties"] == pytest.approx(1 - row["reward/signal"]) for row in rows)
        assert any(row["reward/signal"] for row in rows)
        samples = [row for row in lines(Path("run/samples.jsonl")) if row.get("side")]
        for row in samples:
            assert row["rewards"]["judge"] == (row["side"] == "chosen")
            assert {*row["logged"]["judge"]} == {"first", "exchanged"}


LORA = {"rank": 4}


@pytest.mark.parametrize("place", slow(["base", "judge"]))
def test_a_model_that_writes_no_verdict_ends_the_run_with_what_it_wrote(tmp_path, capsys, place):
    """Random weights as a judge: the base under the adapter, or a folder of its own."""
    model_folder(tmp_path / "judge", max_position_embeddings=2048)
    judge = {"model": place, "rubric": "rubric.md", "max_tokens": 8}
    model = {"path": "judge"}
    recipe = policy(tmp_path, "", model=model, adapter=LORA, reward={"judge": judge}, data__eval=None)
    said = refused(capsys, "run", recipe)
    assert (
        "none of the 16 samples of a step could be scored, the first because judge gave no verdict, asked twice" in said
    )
    assert "its reply is no JSON object" in said


def test_mistakes_are_told(tmp_path, capsys):
    model_folder(tmp_path / "small")
    model_folder(tmp_path / "large", max_position_embeddings=2048)
    recipe = policy(tmp_path, "http://127.0.0.1:9/v1")

    def said(*words: str) -> str:
        return refused(capsys, "check", recipe, *words)

    base = "reward.judge={model: base, rubric: rubric.md}"
    lora = "adapter={rank: 4}"
    assert "reward.judge.model: base is the frozen base under an adapter, and here all weights train" in said(base)
    assert "where adapter.also trains a part of it" in said(base, "adapter={rank: 4, also: [lm_head]}")
    assert "base is on the servers" in said(base, lora, "rollout={engine: vllm, servers: [http://h:1]}")
    assert "leave max_staleness out" in said(base, lora, "rollout={max_staleness: 1, mesh: {devices: 1}}")
    pairwise = "reward.judge.pairwise=true"
    assert "it is for `algorithm: {name: dpo, online: true, group_size: 2}`" in said(pairwise)
    assert "a held-out row has one answer" in said(pairwise, "algorithm={name: dpo, online: true}")
    assert "write its path too, as in http://host:8000/v1" in said("reward.judge.model=http://host:8000")
    assert "a key is for key_variable" in said("reward.judge.model=http://me:secret@host/v1")
    assert "write the worst score and then the best" in said("reward.judge.scale=[1, 0]")
    assert "length: of no effect with a server" in said("reward.judge.length=100")
    assert "served, options: of no effect without a server" in said(
        "reward.judge={model: small, rubric: rubric.md, served: x, options: {a: 1}}"
    )
    assert "Did you mean 'rubric'" in said("reward.judge.rubrik=rubric.md")
    assert "judge stands there twice" in said("reward.functions=[{name: number, label: judge}]")
    (tmp_path / "rubric.md").write_text("- nothing\n")
    assert "rubric.md, line 1: '- nothing' is no criterion" in said()
    write_rubric(tmp_path)
    run = refused(capsys, "run", recipe)
    assert "reward.judge.model: http://127.0.0.1:9/v1 cannot be asked: /models: ConnectError" in run
    small = "reward.judge={model: small, rubric: rubric.md}"
    said_of_small = refused(capsys, "run", recipe, small)
    assert "reward.judge.model: small cannot judge by rubric.md: its question has" in said_of_small
    assert "tokens, but the model ends at 128" in said_of_small
    short = "reward.judge={model: large, rubric: rubric.md, length: 700, max_tokens: 200}"
    assert "leave no room for an answer in 700" in refused(capsys, "run", recipe, short)
    assert "there is no such folder" in refused(
        capsys, "run", recipe, "reward.judge={model: ./none, rubric: rubric.md}"
    )


@pytest.mark.slow
def test_a_toy_run_asks_nobody(tmp_path, capsys):
    """--tiny has no server and no model that writes verdicts: the length of the answers stands in."""
    recipe = policy(tmp_path, "http://127.0.0.1:9/v1")
    train(recipe, "--tiny", "steps=1")
    assert "judge: the length of the answers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_guide_runs(tmp_path):
    """Its rubric and its recipe as they stand, but for the model and the server's address."""
    page = (ROOT / "docs/guide/judges.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (rubric,) = re.findall(r"^``` title=\"rubric.md\"\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "rubric.md").write_text(rubric)
    (tmp_path / "judged.yaml").write_text(recipe)
    write_rows(tmp_path / "sums.jsonl", [{"prompt": "What is 7 times 8?", "answer": 56}] * 8)
    model_folder(tmp_path / "model", max_position_embeddings=512)
    fake = FakeJudge(
        lambda messages: json.dumps({name: {"score": 0.5, "reason": ""} for name in ("simple", "friendly")})
    )
    with served(fake) as url:
        train("judged.yaml", f"reward.judge.model={url}", "model.path=model", "output=run", "data.completion_length=12")
    assert [row["reward/judge/simple"] for row in metrics("run") if "reward/judge" in row] == [0.5, 0.5]


@pytest.mark.parametrize("name", slow(["ppo"]))
def test_other_algorithms_have_it_as_any_reward(tmp_path, name):
    with served(FakeJudge()) as url:
        train(policy(tmp_path, url, algorithm={"name": name}, steps=2))
    assert all(row["reward/judge"] > 0.25 for row in metrics("run") if "reward/judge" in row)
