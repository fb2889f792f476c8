"""Scores beside completions, the best of n as rows to train on, and a file that goes on after a kill.

A byte is a token. The reward is the share of even token ids, which a random model varies in, or a table by hand.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.marks import slow
from tests.tiny_runs import files, lines, model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.commands.generate import choose
from tunix.commands.resumable_output import ResumableOutput
from tunix.data.examples import Examples
from tunix.data.pipeline import Batches
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Prompt
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.recipe.recipe import Recipe
from tunix.run.inputs import open_inputs

IDS = [[5, 60, 70], [80, 81, 82, 83, 84], [9], [100, 20, 30, 40, 50, 60, 70]]
TOKENIZER = bytes_tokenizer("llama3")
CALL = ["--input", "rows.jsonl", "--out", "out.jsonl", "--max-tokens", "6"]
REWARDS = '''
import time
from pathlib import Path

def even(completion, completion_ids):
    """The share of even ids."""
    return sum(i % 2 == 0 for i in completion_ids) / len(completion_ids)

def first(completion, answer):
    """Fails where the row says so."""
    if answer is None:
        raise RuntimeError("no answer")
    return float(answer)

def patient(completion, wait):
    """Waits for a file."""
    while wait and not Path("go").exists():
        time.sleep(0.02)
    return float(len(completion))
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "bare", tokenizer=False)


@pytest.fixture(autouse=True)
def _rewards() -> None:
    Path("rewards.py").write_text(REWARDS)


def asked(model: Path, rows: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    """What `tunix generate MODEL --input rows --out out WORDS` writes."""
    write_rows(Path("rows.jsonl"), rows)
    Path("out.jsonl").unlink(missing_ok=True)
    assert main(["generate", str(model), *CALL, *words]) == 0
    assert not Path("out.jsonl.partial").exists()
    return lines(Path("out.jsonl"))


# --- Choosing ---------------------------------------------------------------------------------------------------------


def test_the_best_are_taken_and_of_equals_the_first(bare: Path):
    prompt = Prompt(np.array(IDS[0], np.int32), "", {"input_ids": IDS[0]})
    inference = InferenceModel(InferenceOptions(str(bare)))

    def taken(rewards: list[float | None], most: int | None, threshold: float | None) -> list[int]:
        group = [{"tokens": [9], "reward": reward, "row": 0, "sample": i} for i, reward in enumerate(rewards)]
        return [row["sample"] for row in choose(inference, [prompt], [group], most, threshold).rows]

    rewards = [0.5, 1.0, None, 0.2, 1.0]
    assert taken(rewards, 1, None) == [1]
    assert taken(rewards, 3, None) == [1, 4, 0]
    assert taken(rewards, None, 0.5) == [1, 4, 0]
    assert taken(rewards, 9, 0.4) == [1, 4, 0]
    assert taken(rewards, None, 1.1) == []
    assert taken([None, None], 1, None) == []


def test_scores_stand_beside_each_completion(base: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"input_ids": ids, "answer": answer} for ids, answer in zip(IDS, [2, None, 4, 1], strict=True)]
    words = ["--n", "3", "--reward", "rewards.py:even", "--reward", "{name: 'rewards.py:first', weight: 0.5}"]
    found = asked(base, rows, *words)
    for i, row in enumerate(found):
        even = sum(token % 2 == 0 for token in row["tokens"]) / len(row["tokens"])
        first = rows[i // 3]["answer"]
        assert row["rewards"] == {"even": even, "first": first}
        assert row["reward"] == (None if first is None else even + 0.5 * first)
        assert ("failures" in row) == (first is None)
    assert "no answer" in found[3]["failures"]["first"]
    valid = [row["reward"] for row in found if row["reward"] is not None]
    assert len(valid) == 9
    assert f"mean reward {np.mean(valid):.4f}, 3 without a score" in capsys.readouterr().out


def test_the_options_of_a_reward(base: Path):
    """Six tokens, a target of 4, a width of 4: 1 - 2/4."""
    rows = [{"input_ids": IDS[1]}]
    for spec in ("length target=4 width=4", "{name: length, options: {target: 4, width: 4}}"):
        (found,) = asked(base, rows, "--temperature", "0", "--reward", spec)
        assert (len(found["tokens"]), found["reward"]) == (6, 0.5)


# --- Rows to train on -------------------------------------------------------------------------------------------------


def trained(data: Path, model: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, trained tokens) of the rows of a file, as a run of this model packs them."""
    changes = {"model": {"path": str(model), "dtype": "float32"}, "data.train": str(data), "data.shuffle": False}
    recipe = Recipe.load(write_recipe(Path("r.yaml"), {**changes, "steps": 1, "batch_size": 1}))
    found = open_inputs(recipe, Path("run"))
    stream = Batches(Examples(found.train, found.tokenizer, recipe.data), 1, seed=0, epochs=1)
    sequences = [packed.sequences[0] for packed in stream]
    stream.close()
    return [(one.tokens[~one.loss_mask].tolist(), one.tokens[one.loss_mask].tolist()) for one in sequences]


@pytest.mark.parametrize("named", ["bare", *slow(["base"])])
def test_what_is_trained_is_what_was_sampled(named: str, base: Path, bare: Path, request: pytest.FixtureRequest):
    """The best two of four, by the scores of all four; their tokens, and no others, are targets of a run."""
    model = {"base": base, "bare": bare}[named]
    rows = [{"input_ids": ids} for ids in IDS]
    words = ["--n", "4", "--reward", "rewards.py:even"]
    every = asked(model, rows, *words)
    best = asked(model, rows, *words, "--best", "2")
    expected = []
    for i in range(len(IDS)):
        group = every[4 * i : 4 * i + 4]
        expected += [group[j] for j in sorted(range(4), key=lambda j: -group[j]["reward"])[:2]]
    told = ("reward", "row", "sample")
    assert [[row[name] for name in told] for row in best] == [[row[name] for name in told] for row in expected]
    assert trained(Path("out.jsonl"), model) == [(IDS[row["row"]], row["tokens"]) for row in expected]
    train("r.yaml")


def test_rows_are_text_where_their_text_says_it_all(base: Path):
    """Answers that end in the template's end of a turn are messages; one that was cut off makes all rows ids."""
    inference = InferenceModel(InferenceOptions(str(base), system="be brief"))
    row = {"prompt": "hi", "answer": 3}
    prompt = Prompt(inference.prompt(row, "the row"), "hi", row)
    end = TOKENIZER.hf.convert_tokens_to_ids("<|eot_id|>")

    def said(text: str, ends: bool, reward: float) -> dict[str, Any]:
        tokens = TOKENIZER.encode(text) + [end] * ends
        return {"tokens": tokens, "text": text, "reward": reward, "row": 0, "sample": 0}

    whole, cut = said("yes", True, 1.0), said("ye", False, 0.5)
    chosen = choose(inference, [prompt], [[cut, whole]], 1, None)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yes"}]
    assert chosen.rows == [{"prompt": messages, "completion": answer, "reward": 1.0, "row": 0, "sample": 0}]
    assert chosen.longest == len(prompt.tokens) + 4
    write_rows(Path("best.jsonl"), chosen.rows)
    ids = prompt.tokens.tolist()
    assert trained(Path("best.jsonl"), base) == [(ids, whole["tokens"])]

    both = choose(inference, [prompt], [[cut, whole]], 2, None)
    assert both.respelled == 1
    assert both.rows[1]["input_ids"] == ids + cut["tokens"]
    assert both.rows[1]["labels"] == [-100] * len(ids) + cut["tokens"]
    write_rows(Path("best.jsonl"), both.rows)
    assert trained(Path("best.jsonl"), base) == [(ids, whole["tokens"]), (ids, cut["tokens"])]


def test_plain_strings_stay_strings(base: Path):
    """BOS is 2, EOS is 1; h is byte 104, after 3 specials and 3 markers."""
    inference = InferenceModel(InferenceOptions(str(base), raw=True))
    prompt = Prompt(inference.prompt({"prompt": "h"}, "the row"), "h", {"prompt": "h"})
    assert prompt.tokens.tolist() == [2, 110]
    one = {"tokens": [111, 1], "text": "i", "reward": 1.0, "row": 0, "sample": 0}
    chosen = choose(inference, [prompt], [[one]], 1, None)
    assert chosen.rows == [{"prompt": "h", "completion": "i", "reward": 1.0, "row": 0, "sample": 0}]


def test_prompts_without_a_row_are_told(base: Path, capsys: pytest.CaptureFixture[str]):
    answers = [2, None, 4, 1]
    rows = [{"input_ids": ids, "answer": answer} for ids, answer in zip(IDS, answers, strict=True)]
    found = asked(base, rows, "--n", "2", "--reward", "rewards.py:first", "--threshold", "2")
    assert [(row["row"], row["sample"]) for row in found] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    told = capsys.readouterr().out
    assert "4 rows to train on, from 2 of 4 prompts (1 had nothing above the threshold, 1 had no score)" in told
    assert "as ids" in told


def test_what_was_drawn_is_chosen_from_again(base: Path, capsys: pytest.CaptureFixture[str]):
    """A threshold that nothing reaches loses nothing: a lower one draws no token."""
    write_rows(Path("rows.jsonl"), [{"input_ids": ids, "answer": i} for i, ids in enumerate(IDS)])
    words = ["generate", str(base), *CALL, "--reward", "rewards.py:first"]
    assert main([*words, "--threshold", "9"]) == 2
    assert "no completion of 4 rows was taken (4 had nothing above the threshold)" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    assert main([*words, "--threshold", "3"]) == 0
    assert [row["row"] for row in lines(Path("out.jsonl"))] == [3]
    assert "going on after 4 of 4 rows" in capsys.readouterr().err


# --- Going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # three processes
def test_a_killed_call_goes_on_to_the_same_bytes(base: Path, monkeypatch: pytest.MonkeyPatch):
    """One slot and one sample: chunks of 8 rows. The second chunk waits in its reward, and is killed there."""
    drawn = np.random.default_rng(0).integers(6, 200, (20, 4)).tolist()
    write_rows(Path("rows.jsonl"), [{"input_ids": ids, "wait": i >= 8} for i, ids in enumerate(drawn)])
    words = ["generate", str(base), *CALL, "--slots", "1", "--reward", "{name: 'rewards.py:patient', label: p}"]
    words += ["--deadline", "600"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-m", "tunix.cli", *words], env=environment)
    kept = Path("out.jsonl.partial")
    while not kept.exists() or kept.read_bytes().count(b"\n") < 9:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("out.jsonl").exists()
    # A line that the kill has torn, as a slow disk could.
    kept.write_bytes(kept.read_bytes() + b'{"row": 8, "sam')
    before = kept.read_bytes()[: kept.read_bytes().rindex(b"\n")].splitlines()[1:]
    Path("go").touch()
    chunks = []
    append = ResumableOutput.append

    def watched(self: ResumableOutput, lines: Iterable[str]) -> None:
        written = list(lines)
        chunks.append((self.done, len(written)))
        append(self, written)

    monkeypatch.setattr(ResumableOutput, "append", watched)
    assert main(words) == 0
    assert chunks == [(8, 8), (16, 4)]
    resumed = Path("out.jsonl").read_bytes()
    assert resumed.splitlines()[:8] == before
    assert not kept.exists()
    Path("out.jsonl").unlink()
    assert main(words) == 0
    assert Path("out.jsonl").read_bytes() == resumed


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_there(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    write_rows(Path("rows.jsonl"), [{"input_ids": [7 + i]} for i in range(10)])
    words = ["generate", str(base), *CALL, "--slots", "1"]
    append = ResumableOutput.append

    def stopped(self: ResumableOutput, lines: Iterable[str]) -> None:
        append(self, lines)
        if self.done == 8:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(ResumableOutput, "append", stopped)
        assert main(words) == 130
    assert "8 of 10 rows are kept next to out.jsonl; the same call goes on" in capsys.readouterr().err
    assert main([*words, "--seed", "1"]) == 2
    assert "out.jsonl.partial holds what another call began: seed was 0, and is 1" in capsys.readouterr().err
    write_rows(Path("rows.jsonl"), [{"input_ids": [8 + i]} for i in range(10)])
    assert main(words) == 2
    assert "began: other rows. Repeat" in capsys.readouterr().err
    write_rows(Path("rows.jsonl"), [{"input_ids": [7 + i]} for i in range(10)])
    assert main(words) == 0
    assert [row["row"] for row in lines(Path("out.jsonl"))] == list(range(10))


# --- Bad input --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such reward": (["--reward", "exact_mach"], ["'exact_mach'", "Did you mean 'exact_match'?"]),
    "no file": (["--reward", "gone.py:f"], ["there is no file gone.py"]),
    "no column": (["--reward", "exact_match"], ["exact_match wants the column 'answer'", "columns"]),
    "no option": (["--reward", "length target=4"], ["the reward length wants the option 'width'"]),
    "wrong option": (["--reward", "length target=4 wide=4"], ["no option 'wide'", "Did you mean 'width'?"]),
    "no value": (["--reward", "length target"], ["--reward 'length target'", "'target' is no option; write key=value"]),
    "wrong key": (["--reward", "{name: number, weigth: 2}"], ["--reward: functions.0.weigth: unknown key", "'weight'"]),
    "nothing": (["--reward", " "], ["it names no reward"]),
    "twice": (["--reward", "number", "--reward", "number"], ["number stands there twice"]),
    "best of what": (["--best"], ["--best selects by reward"]),
    "above what": (["--threshold", "1"], ["--threshold selects by reward", "--reward"]),
    "best none": (["--reward", "number", "--best", "0"], ["--best", "'0' is not a whole number above 0"]),
    "no deadline": (["--reward", "number", "--deadline", "0"], ["deadline", "not a number above 0"]),
}


@pytest.mark.parametrize(("words", "fragments"), BAD.values(), ids=BAD)
def test_what_cannot_be_scored_says_why(
    words: list[str], fragments: list[str], base: Path, capsys: pytest.CaptureFixture[str]
):
    write_rows(Path("rows.jsonl"), [{"input_ids": [7]}])
    before = files(Path())
    assert main(["generate", str(base), *CALL, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, files(Path())) == ("", before)
    assert all(fragment in err for fragment in fragments), err


def test_scores_of_a_prompt_go_to_a_file(base: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(base), "hi", "--reward", "number"]) == 2
    assert "--reward: say with --out FILE where the scores go" in capsys.readouterr().err


def test_a_strange_partial_file_is_left_alone(base: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(Path("rows.jsonl"), [{"input_ids": [7]}])
    Path("out.jsonl.partial").write_text("mine\nall mine\n")
    assert main(["generate", str(base), *CALL]) == 2
    assert "out.jsonl.partial is no beginning of ours" in capsys.readouterr().err
    assert Path("out.jsonl.partial").read_text() == "mine\nall mine\n"
    Path("out.jsonl.partial").write_text(json.dumps({"rewards": 1}) + "\n{}\n")
    assert main(["generate", str(base), *CALL]) == 2
    assert "began: rewards was 1, and is null; other model; other rows; " in capsys.readouterr().err
