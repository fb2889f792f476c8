"""Runs that learn from a judge: on a server, killed and resumed; in pairs; the base of an adapter; what is refused."""

from pathlib import Path

import pytest

from tests.fake_judge import FakeJudge, by_rule, served, write_rubric
from tests.marks import slow
from tests.tiny_rl import write_policy, write_prompts
from tests.tiny_runs import lines, metrics, model_folder, train
from tunix.cli import main

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


def test_a_run_that_its_judge_ended_goes_on_and_asks_nothing_twice(tmp_path, capsys):
    """The server dies within a step. The same command asks for what is missing alone, and all steps are those of a run
    that nothing has ended."""
    whole = FakeJudge()
    with served(whole) as url:
        train(recipe := policy(tmp_path, url), "output=whole")
    with served(FakeJudge()) as url:
        first = FakeJudge(dies_after=len(whole.bodies) // 2)
    with served(first) as url:
        said = refused(capsys, "run", policy(tmp_path, url, rollout__samples=2), f"reward.judge.model={url}")
        second, first.dies_after = len(first.bodies), None
        assert "could be scored, the first because judge did not answer in 1 s (the last time /chat/completions" in said
        train(recipe, f"reward.judge.model={url}", "rollout.samples=2")
    asked = [body["messages"][0]["content"] for body in first.bodies]
    assert len(set(asked)) == len(asked) == len(whole.bodies)
    assert 0 < second < len(asked)
    rows, expected = ([row for row in metrics(run) if "train/loss" in row] for run in ("run", "whole"))
    assert len(rows) == 3
    for row, other in zip(rows, expected, strict=True):
        for name in ("train/loss", "reward/mean", "reward/judge", "reward/judge/capitals", "reward/judge/short"):
            assert row[name] == other[name]
        assert row["reward/failed"] == 0
        assert row["reward/judge"] == pytest.approx((3 * row["reward/judge/capitals"] + 1) / 4, abs=1e-6)
        assert row["compile/count"] == rows[0]["compile/count"]
        assert 0 <= row["perf/judge_cached"] <= 1
    assert all("eval/reward" in row for row in metrics("run") if "eval/loss" in row)
    samples = [row for row in lines(Path("run/samples.jsonl")) if "rewards" in row]
    assert samples[0]["logged"]["judge"]["short"] == {"score": 1, "reason": "y"}
    assert len(lines(Path("run/judge.jsonl"))) == len(asked)


def test_dpo_learns_from_pairs_that_a_judge_compares(tmp_path):
    """A judge that always prefers the first has no preference: its pairs are left out, and counted."""
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
        fake.reply = lambda messages: by_rule(messages).replace('"B"', '"A"')
        train(recipe, "output=biased")
    biased = [row for row in metrics("biased") if "reward/mean" in row]
    assert all(row["reward/judge/ties"] == 1 and row["reward/signal"] == 0 for row in biased)


LORA = {"rank": 4}


@pytest.mark.parametrize("place", ["base", "judge"])
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
    recipe = policy(tmp_path, "http://127.0.0.1:9/v1")

    def said(*words: str) -> str:
        return refused(capsys, "check", recipe, *words)

    base = "reward.judge={model: base, rubric: rubric.md}"
    lora = "adapter={rank: 4}"
    assert "reward.judge.model: base is the frozen base under an adapter, and here all weights train" in said(base)
    assert "where adapter.also trains lm_head" in said(base, "adapter={rank: 4, also: [lm_head]}")
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
    assert "leave no room for an answer in 128" in refused(capsys, "run", recipe, small)
    assert "there is no such folder" in refused(
        capsys, "run", recipe, "reward.judge={model: ./none, rubric: rubric.md}"
    )


def test_a_toy_run_asks_nobody(tmp_path, capsys):
    """--tiny has no server and no model that writes verdicts: the length of the answers stands in."""
    recipe = policy(tmp_path, "http://127.0.0.1:9/v1")
    train(recipe, "--tiny", "steps=1")
    assert "judge: the length of the answers" in capsys.readouterr().err


@pytest.mark.parametrize("name", slow(["ppo"]))
def test_other_algorithms_have_it_as_any_reward(tmp_path, name):
    with served(FakeJudge()) as url:
        train(policy(tmp_path, url, algorithm={"name": name}, steps=2))
    assert all(row["reward/judge"] > 0.25 for row in metrics("run") if "reward/judge" in row)
