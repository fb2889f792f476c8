"""`tunix eval`: what a run's own evaluation says, said again; numbers by hand; pairs, pass@k, mistakes."""

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.test_reward_run import write_reward
from tests.tiny_rl import write_policy
from tests.tiny_runs import EVAL, files, lines, metrics, model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.rollout.environments.adapters import ADAPTERS, Adapter
from tunix.run.estimates import mean_of, means_of, pass_at_k, ratio_of

IDS = [[5, 60, 70], [80, 81, 82, 83, 84], [9], [100, 20, 30, 40, 50, 60, 70]]
REWARDS = '''
def even(completion, completion_ids):
    """The share of even ids."""
    return sum(i % 2 == 0 for i in completion_ids) / len(completion_ids)

def unsure(completion, completion_ids, answer):
    """Fails where the first id is no multiple of three."""
    if completion_ids[0] % 3:
        raise RuntimeError("cannot say")
    return float(answer)
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


def evaluated(*words: str) -> dict[str, Any]:
    """What `tunix eval WORDS --out out.json` writes."""
    Path("out.json").unlink(missing_ok=True)
    assert main(["eval", *words, "--out", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


def values(found: dict[str, Any]) -> dict[str, float]:
    return {name: number["value"] for name, number in found["metrics"].items()}


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    """Of 5 samples 2 are right: both of two draws miss in C(3, 2) = 3 of C(5, 2) = 10 cases."""
    n, correct = np.array([5, 5, 4, 4, 200]), np.array([2, 0, 3, 4, 1])
    np.testing.assert_allclose(pass_at_k(n, correct, 2), [0.7, 0.0, 1.0, 1.0, 0.01])
    np.testing.assert_allclose(pass_at_k(n, correct, 1), [0.4, 0.0, 0.75, 1.0, 0.005])
    for c in range(13):
        expected = 1 - math.comb(12 - c, 5) / math.comb(12, 5)
        assert pass_at_k(np.array([12]), np.array([c]), 5)[0] == pytest.approx(expected, abs=1e-12)


def test_errors_by_hand():
    """Mean of 1, 2, 6 is 3; squares 4 + 1 + 9 = 14; 14 / 2 / 3."""
    found = mean_of(np.array([1.0, 2.0, 6.0]))
    assert (found.value, found.count) == (3.0, 3)
    assert found.error == pytest.approx(math.sqrt(14 / 2 / 3))
    assert mean_of(np.array([1.0])).error is None
    # 6 nats over 4 tokens: 1.5. Residuals 4 - 1.5 = 2.5 and 2 - 4.5 = -2.5; sqrt(2 / 1 * 12.5) / 4.
    found = ratio_of(np.array([4.0, 2.0]), np.array([1, 3]))
    assert (found.value, found.error) == (1.5, pytest.approx(1.25))
    nan = math.nan
    assert means_of(np.array([[1.0, nan], [nan, nan], [0.0, 1.0]])).tolist() == [1.0, 0.5]


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a run of both kinds of evaluation, and the command after it
def test_a_run_is_measured_as_it_measured_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """SFT whose answers are judged too: loss and reward of the weights that it exported."""
    write_policy(tmp_path)  # its rewards.py
    changes = {**EVAL, "reward": {"functions": ["rewards.py:letters"]}, "data.completion_length": 6}
    train(str(write_recipe(tmp_path / "sft.yaml", changes)))
    last = next(row for row in reversed(metrics("run")) if "eval/loss" in row)
    capsys.readouterr()
    found = evaluated("run")
    assert list(found["metrics"]) == ["loss", "perplexity", "reward"]
    assert values(found)["loss"] == pytest.approx(last["eval/loss"], rel=1e-5)
    assert values(found)["perplexity"] == pytest.approx(math.exp(last["eval/loss"]), rel=1e-4)
    assert values(found)["reward"] == pytest.approx(last["eval/reward"], rel=1e-6)
    by_row = [row for row in found["rows"] if row["task"] == "loss"]
    assert [row["row"] for row in by_row] == list(range(6))
    tokens = np.array([row["tokens"] for row in by_row])
    assert np.average([row["loss"] for row in by_row], weights=tokens) == pytest.approx(values(found)["loss"])
    out = capsys.readouterr().out
    assert out.startswith("run on ")
    assert "6 rows" in out

    three = evaluated("run", "held.jsonl", "--task", "loss", "--rows", "3")
    assert three["metrics"]["loss"]["count"] == 3
    assert [row["loss"] for row in three["rows"]] == pytest.approx([row["loss"] for row in by_row[:3]], rel=1e-5)


ENVIRONMENT = '''
from tunix.rollout.environments.base import Environment, Step

class Letters(Environment):
    """Two turns; each is worth half of its share of letters."""

    def reset(self, row, rng):
        self.turn = 0
        return row["prompt"]

    def step(self, action, tokens):
        self.turn += 1
        share = sum(c.isascii() and c.isalnum() for c in action) / max(len(action), 1)
        return Step("go on:" if self.turn == 1 else None, reward=share / 2, done=self.turn == 2)
'''


@pytest.mark.slow
def test_a_run_brings_its_environment(tmp_path: Path):
    Path("letters.py").write_text(ENVIRONMENT)
    changes = {"reward": None, "rollout__environment": {"name": "letters.py:Letters"}, "steps": 1}
    train(str(write_policy(tmp_path, **changes, data__eval="held.jsonl", data__max_length=48)))
    last = next(row for row in reversed(metrics("run")) if "eval/reward" in row)
    found = evaluated("run")
    assert values(found) == {"reward": pytest.approx(last["eval/reward"], rel=1e-6)}
    rewards = [row["answers"][0]["reward"] for row in found["rows"]]
    share = evaluated("run", "--task", "accuracy", "--threshold", "0.4")
    assert values(share) == {"accuracy": pytest.approx(np.mean(np.array(rewards) >= 0.4))}


@pytest.mark.slow  # a policy measured on pairs stays
def test_a_reward_model_is_measured_on_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(str(write_reward(tmp_path, steps=4)))
    last = next(row for row in reversed(metrics("reward")) if "eval/rewards/accuracy" in row)
    found = evaluated("reward")
    assert values(found)["pairs/accuracy"] == pytest.approx(last["eval/rewards/accuracy"])
    assert values(found)["pairs/margin"] == pytest.approx(last["eval/rewards/margin"], abs=1e-5)
    capsys.readouterr()
    for command in (["generate", "reward", "hi"], ["eval", "reward", "--task", "loss"]):
        assert main(command) == 2
        assert "reward is a reward model: it gives scores and has no log-probs" in capsys.readouterr().err
    # And it judges answers: each score is that of the row that the answer makes.
    write_rows(Path("asked.jsonl"), [{"prompt": "abc>"}, {"prompt": "hgf>"}])
    model = model_folder(tmp_path / "policy", tokenizer=False)
    (Path("reward/export") / "tokenizer.json").is_file()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((Path("reward/export") / name).read_bytes())
    words = ["--input", "asked.jsonl", "--out", "said.jsonl", "--max-tokens", "5", "--raw", "--n", "2"]
    assert main(["generate", str(model), *words, "--reward-model", "reward"]) == 0
    assert all(row["rewards"] == {"model": row["reward"]} for row in lines(Path("said.jsonl")))
    assert len({row["reward"] for row in lines(Path("said.jsonl"))}) > 1


# --- Any model --------------------------------------------------------------------------------------------------------


def test_pairs_of_a_policy_are_those_of_transformers(base: Path):
    pairs = [
        {"prompt_ids": ids, "chosen_ids": [60 + i, 70], "rejected_ids": [80, 90 + i, 7]} for i, ids in enumerate(IDS)
    ]
    write_rows(Path("pairs.jsonl"), pairs)
    found = evaluated(str(base), "pairs.jsonl")
    model = AutoModelForCausalLM.from_pretrained(base)

    def logprob(prompt: list[int], completion: list[int]) -> float:
        given = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(given).logits[0].float(), -1)
        return sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion))

    sums = np.array([[logprob(p["prompt_ids"], p[side]) for side in ("chosen_ids", "rejected_ids")] for p in pairs])
    np.testing.assert_allclose([[row["chosen"], row["rejected"]] for row in found["rows"]], sums, atol=1e-4)
    margins, per_token = sums[:, 0] - sums[:, 1], sums[:, 0] / 2 - sums[:, 1] / 3
    expected = [(margins > 0).mean(), margins.mean(), (per_token > 0).mean(), per_token.mean()]
    names = ["pairs/accuracy", "pairs/margin", "pairs/accuracy_per_token", "pairs/margin_per_token"]
    assert list(found["metrics"]) == names
    np.testing.assert_allclose(list(values(found).values()), expected, atol=1e-4)


@pytest.mark.slow
def test_pass_at_k_of_drawn_answers(base: Path):
    """The answers are those of `tunix generate`; an answer is right where at least two thirds of its ids are even."""
    Path("rewards.py").write_text(REWARDS)
    write_rows(Path("rows.jsonl"), [{"input_ids": ids} for ids in IDS])
    draws = ["--n", "4", "--max-tokens", "3", "--seed", "3", "--reward", "rewards.py:even"]
    assert main(["generate", str(base), "--input", "rows.jsonl", "--out", "drawn.jsonl", *draws]) == 0
    drawn = lines(Path("drawn.jsonl"))
    right = np.array([row["reward"] >= 0.6 for row in drawn]).reshape(4, 4).sum(1)
    assert len(set(right.tolist())) > 1
    words = ["rows.jsonl", "--column", "prompt_ids=input_ids", *draws, "--threshold", "0.6"]
    found = evaluated(str(base), *words, "--task", "pass", "--k", "1", "2", "4")
    assert [a["tokens"] for row in found["rows"] for a in row["answers"]] == [row["tokens"] for row in drawn]
    missed = {k: [math.comb(4 - c, k) / math.comb(4, k) for c in right.tolist()] for k in (1, 2, 4)}
    expected = {f"pass@{k}": pytest.approx(1 - np.mean(x)) for k, x in missed.items()}
    assert values(found) == expected
    share = evaluated(str(base), *words, "--task", "accuracy", "--temperature", "1")
    assert values(share) == {"accuracy": pytest.approx(right.mean() / 4)}


def test_failures_count_nowhere(base: Path, capsys: pytest.CaptureFixture[str]):
    Path("rewards.py").write_text(REWARDS)
    rows = [{"prompt_ids": [7 + i], "answer": i} for i in range(8)]
    write_rows(Path("rows.jsonl"), rows)
    found = evaluated(str(base), "rows.jsonl", "--reward", "rewards.py:unsure", "--max-tokens", "3")
    scored = [row["row"] for row in found["rows"] if row["answers"][0]["reward"] is not None]
    sure = [row["row"] for row in found["rows"] if row["answers"][0]["tokens"][0] % 3 == 0]
    assert scored == sure
    assert 0 < len(sure) < 8
    assert values(found) == {"reward": pytest.approx(np.mean(sure))}
    assert found["metrics"]["reward"]["count"] == len(sure)
    assert f"{8 - len(sure)} have no score and count nowhere; the first: unsure raised" in capsys.readouterr().out


def test_rows_alone_as_json_lines(base: Path):
    write_rows(Path("rows.jsonl"), [{"input_ids": ids} for ids in IDS if len(ids) > 1])
    assert main(["eval", str(base), "rows.jsonl", "--out", "out.jsonl"]) == 0
    assert main(["score", str(base), "rows.jsonl", "--out", "scores.jsonl"]) == 0
    losses = [-np.mean(row["logprobs"]) for row in lines(Path("scores.jsonl"))]
    found = lines(Path("out.jsonl"))
    assert [row["tokens"] for row in found] == [2, 4, 6]  # nothing predicts the first token
    np.testing.assert_allclose([row["loss"] for row in found], losses, atol=1e-5)


@pytest.mark.slow
def test_a_run_and_its_export_read_strings_alike_and_say_how(base: Path, capsys: pytest.CaptureFixture[str]):
    """Of rows that are strings and a tokenizer with a chat template: a run of strings, and one of chats."""
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("yes", "no")]
    write_rows(Path("train.jsonl"), rows)
    write_rows(Path("rows.jsonl"), rows)
    losses = {}
    for name, chat in (("plain", False), ("chats", True)):
        Path(name).mkdir()
        data = {"train": "train.jsonl", "chat": chat}
        recipe = {"model": {"path": str(base)}, "data": data, "output": name}
        (Path(name) / "recipe.yaml").write_text(json.dumps(recipe))
        (Path(name) / "export").symlink_to(base)
        for model in (name, f"{name}/export"):
            losses[model] = values(evaluated(model, "rows.jsonl"))["loss"]
            first = capsys.readouterr().out.splitlines()[0]
            said = "messages of the chat template (--raw" if chat else "strings stand as they are"
            assert first.startswith(f"{model} on rows.jsonl; ")
            assert said in first
    losses["any"], losses["raw"] = (values(evaluated(str(base), "rows.jsonl", *x))["loss"] for x in ([], ["--raw"]))
    losses["chats --raw"] = values(evaluated("chats", "rows.jsonl", "--raw"))["loss"]
    plain, chats = losses["raw"], losses["any"]
    assert abs(plain - chats) > 1e-3
    assert losses == {
        **dict.fromkeys(("plain", "plain/export", "raw", "chats --raw"), pytest.approx(plain, abs=1e-6)),
        **dict.fromkeys(("chats", "chats/export", "any"), pytest.approx(chats, abs=1e-6)),
    }


def test_the_split_for_tests_is_measured(base: Path, capsys: pytest.CaptureFixture[str]):
    Path("rows").mkdir()
    write_rows(Path("rows/train.jsonl"), [{"input_ids": [5, 6]}] * 4)
    write_rows(Path("rows/test.jsonl"), [{"input_ids": [7, 8, 9]}] * 3)
    found = evaluated(str(base), "rows")
    assert "base on rows, split test\n" in capsys.readouterr().out
    assert (found["data"], found["split"]) == ("rows", "test")
    assert [row["tokens"] for row in found["rows"]] == [2, 2, 2]
    assert evaluated(str(base), "rows", "--split", "train")["split"] == "train"
    assert evaluated(str(base), "rows/train.jsonl")["split"] is None


def test_an_environment_of_the_command_line(base: Path, capsys: pytest.CaptureFixture[str]):
    """Greedy and sampled answers of one call, as two calls have them; the rows keep both, with the prompts."""
    Path("letters.py").write_text(ENVIRONMENT)
    write_rows(Path("rows.jsonl"), [{"prompt": word} for word in ("ab", "cd", "ef")])
    words = ["rows.jsonl", "--environment", "letters.py:Letters", "--max-tokens", "6", "--threshold", "0.2"]
    both = evaluated(str(base), *words, "--pass-at", "1,2")
    out = capsys.readouterr().out
    assert "(greedy, 3 answers" in out
    assert "(temperature 1, 6 answers" in out
    assert list(both["metrics"]) == ["reward", "pass@1", "pass@2"]
    assert [row["prompt"] for row in both["rows"]] == ["ab", "cd", "ef"] * 2
    sampled = evaluated(str(base), *words, "--task", "pass", "--k", "1", "2", "--n", "2")
    assert [row["answers"] for row in sampled["rows"]] == [row["answers"] for row in both["rows"][3:]]
    rewards = [[answer["reward"] for answer in row["answers"]] for row in sampled["rows"]]
    assert values(both)["pass@2"] == pytest.approx(np.mean([max(x) >= 0.2 for x in rewards]))


def test_options_of_an_environment(base: Path):
    """The game's range is in its prompt; a reward of the command line is added to that of the game."""
    words = ["tunix.rollout.environments.guessing:secrets", "--environment", "guessing", "--rows", "2"]
    found = evaluated(
        str(base), *words, "--options", "{highest: 3}", "--reward", "format pattern=x", "--max-tokens", "3"
    )
    assert [row["prompt"] for row in found["rows"]] == ["1-3\n", "1-3\n"]
    assert list(found["metrics"]) == ["reward", "reward/format", "reward/environment"]


def test_an_environment_that_makes_its_rows(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Three episodes by number, of a seed that no run trains on: --seed and 2^31."""
    Path("numbered.py").write_text(
        "from tunix.rollout.environments.base import Environment, Step\n\n\n"
        "class Episode(Environment):\n"
        "    def __init__(self, size: int = 8):\n        pass\n\n"
        '    def reset(self, row, rng):\n        return f\'{row["seed"]}/{row["index"]}\'\n\n'
        "    def step(self, action, tokens):\n        return Step(reward=len(tokens), done=True)\n"
    )
    monkeypatch.setitem(ADAPTERS, "reasoning_gym", Adapter("numbered.py:Episode"))
    words = [str(base), "--environment", "reasoning_gym", "--max-tokens", "3", "--seed", "5"]
    found = evaluated(*words, "--options", "{size: 3}")
    assert [row["prompt"] for row in found["rows"]] == [f"{2**31 + 5}/{i}" for i in range(3)]
    assert capsys.readouterr().out.startswith(f"{base} on reasoning_gym\n")
    assert len(evaluated(*words, "--rows", "2")["rows"]) == 2


# --- Bad input --------------------------------------------------------------------------------------------------------

JUDGED = ["rows.jsonl", "--reward", "number"]
BAD: dict[str, tuple[list[str], list[str]]] = {
    "no rows": ([], ["is no run, which would bring its own rows"]),
    "no such rows": (["gone.jsonl"], ["gone.jsonl: there is no such file"]),
    "no such task": (["rows.jsonl", "--task", "los"], ["--task", "'los'"]),
    "nothing judges": (["rows.jsonl", "--task", "reward"], ["nothing scores the answers; add --reward"]),
    "reward for loss": ([*JUDGED, "--task", "loss"], ["--reward changes nothing for loss"]),
    "k for accuracy": ([*JUDGED, "--task", "accuracy", "--k", "2"], ["--k changes nothing for accuracy"]),
    "threshold for reward": ([*JUDGED, "--threshold", "1"], ["--threshold changes nothing for reward"]),
    "k above n": ([*JUDGED, "--task", "pass", "--n", "2", "--k", "4"], ["--k 4 is more than the 2 answers of --n"]),
    "greedy": ([*JUDGED, "--n", "2"], ["greedy answers to one row are all alike"]),
    "no such reward": (["rows.jsonl", "--reward", "numbr"], ["'numbr'", "Did you mean 'number'?"]),
    "no column": (JUDGED, ["the reward number wants the column 'answer'"]),
    "no prompt": (["text.jsonl", "--reward", "format pattern=x"], ["row 1 of text.jsonl has the columns 'text'"]),
    "no pairs": (["text.jsonl", "--task", "pairs"], ["chosen and rejected"]),
    "half a column": (["rows.jsonl", "--column", "prompt"], ["--column 'prompt': write ours=theirs"]),
    "suffix": (["rows.jsonl", "--out", "o.csv"], ["--out o.csv", ".jsonl"]),
    "taken": (["rows.jsonl", "--out", "rows.jsonl"], ["rows.jsonl exists already"]),
    "no such environment": (["rows.jsonl", "--environment", "gessing"], ["'gessing'", "Did you mean 'guessing'?"]),
    "no such option": (
        ["rows.jsonl", "--environment", "guessing", "--options", "{gueses: 3}"],
        ["has no option 'gueses'", "Did you mean 'guesses'?"],
    ),
    "options are no mapping": (["rows.jsonl", "--environment", "guessing", "--options", "3"], ["options: 3 is not"]),
    "half an environment": (["rows.jsonl", "--environment", "{nam: guessing}"], ["nam: unknown key", "'name'"]),
    "options of nothing": (["rows.jsonl", "--options", "{a: 1}"], ["changes nothing without --environment"]),
    "an environment without rows": (["--environment", "guessing"], ["is no run, which would bring its own rows"]),
    "an environment without rewards": (["rows.jsonl", "--environment", "problem"], ["add --reward"]),
    "loss of an environment": (
        ["rows.jsonl", "--environment", "guessing", "--task", "loss"],
        ["--environment changes"],
    ),
    "k twice": ([*JUDGED, "--k", "2", "--pass-at", "1,2"], ["leave one of them out"]),
    "no k": ([*JUDGED, "--pass-at", "1,x"], ["'x' is not a whole number above 0"]),
    "too many tokens": ([*JUDGED, "--max-tokens", "128"], ["--max-tokens 128 leaves no room", "128"]),
}


@pytest.mark.parametrize(("words", "fragments"), BAD.values(), ids=BAD)
def test_what_cannot_be_measured_says_why(
    words: list[str], fragments: list[str], base: Path, capsys: pytest.CaptureFixture[str]
):
    write_rows(Path("rows.jsonl"), [{"prompt": "a", "completion": "b"}])
    write_rows(Path("text.jsonl"), [{"text": "a"}])
    before = files(Path())
    assert main(["eval", str(base), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, files(Path())) == ("", before)
    assert all(fragment in err for fragment in fragments), err


def test_when_nothing_can_be_scored(base: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(Path("rows.jsonl"), [{"prompt": "a", "answer": "none"}])
    assert main(["eval", str(base), *JUDGED, "--max-tokens", "3"]) == 2
    assert "none of 1 answers could be scored, the first because number raised" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "--harness lm-eval needs lm-eval: "), ("0.3.0", "was tried with lm-eval >=0.4.13,<0.5, and 0.3.0 is")],
)
def test_a_harness_is_wanted_in_a_version_that_was_tried(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert main(["eval", "nowhere", "--harness", "lm-eval", "--tasks", "a.yaml"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "a.yaml"], "--harness lm-eval and --tasks FILE ... go together"),
        (["--harness", "lm-eval"], "--harness lm-eval and --tasks FILE ... go together"),
        (["rows.jsonl", "--harness", "lm-eval", "--tasks", "a.yaml"], "DATA changes nothing with --harness"),
        (["--harness", "lm-eval", "--n", "3", "--tasks", "a.yaml"], "--n changes nothing with --harness"),
    ],
)
def test_what_a_harness_does_not_read_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "nowhere", *words]) == 2
    assert says in capsys.readouterr().err
