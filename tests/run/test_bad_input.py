"""What users get wrong when a run, an export or a score begins: exit code 2, one message, nothing of theirs changed.

Mistakes within a recipe's own text are in test_cli.py. Each row of the tables is a mistake made in a folder where
everything else is right: `base` is a model as transformers saves it, `train.jsonl` its rows, `r.yaml` the recipe.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.full_disk import full_disk
from tests.tiny_runs import files, losses, metrics, model_folder, rows, train, write_recipe, write_rows
from tunix.cli import main
from tunix.data.tokenizer import bpe_tokenizer

Mistake = Callable[[Path], Any]
Table = dict[str, tuple[Mistake, list[str], list[str]]]
"""The mistake's name -> how it is made, the words of the command, and what its message has to say."""
CHANGES = {
    "model": {"path": "base", "dtype": "float32"},
    "steps": 4,
    "checkpoint": {"every": 2},
    "mesh": {"data": 1, "fsdp": 8},
}
WEIGHTS = "model.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def write(name: str, data: str | bytes) -> Mistake:
    """The file holds something else."""
    return lambda here: (here / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def remove(name: str) -> Mistake:
    return lambda here: (here / name).unlink()


def cut(name: str, size: int) -> Mistake:
    """The file ends after so many bytes; counted from its end where negative."""
    return lambda here: (here / name).write_bytes((here / name).read_bytes()[:size])


def config(**fields: Any) -> Mistake:
    """base/config.json says something else; None takes a field away."""

    def change(here: Path) -> None:
        path = here / "base/config.json"
        said = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Mistake:
    """base/model.safetensors holds something else."""

    def rewrite(here: Path) -> None:
        found = load_file(here / "base" / WEIGHTS)
        change(found)
        save_file(found, here / "base" / WEIGHTS)

    return rewrite


def sharded(here: Path) -> None:
    """The weights in two files and their index."""
    found = load_file(here / "base" / WEIGHTS)
    (here / "base" / WEIGHTS).unlink()
    parts = {"model-1.safetensors": list(found)[::2], "model-2.safetensors": list(found)[1::2]}
    for name, keys in parts.items():
        save_file({key: found[key] for key in keys}, here / "base" / name)
    places = {key: name for name, keys in parts.items() for key in keys}
    (here / "base/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def missing_shard(here: Path) -> None:
    sharded(here)
    (here / "base/model-2.safetensors").unlink()


def incomplete_shard(here: Path) -> None:
    sharded(here)
    path = here / "base/model-2.safetensors"
    found = load_file(path)
    save_file({key: found[key] for key in list(found)[1:]}, path)


def pickled(here: Path) -> None:
    (here / "base" / WEIGHTS).rename(here / "base/pytorch_model.bin")


def no_tokenizer(here: Path) -> None:
    for path in (here / "base").glob("*token*"):
        path.unlink()
    (here / "base/chat_template.jinja").unlink()


def large_tokenizer(here: Path) -> None:
    bpe_tokenizer([f"word{i} other{i}" for i in range(400)], 400, "llama3").save(here / "base")


def given(*written: Any) -> Mistake:
    """train.jsonl has these rows."""
    return lambda here: write_rows(here / "train.jsonl", written)


def later(bad: Any) -> Mistake:
    """A bad row after good ones: the first is looked at early, the others in their turn."""
    return lambda here: write_rows(here / "train.jsonl", [*rows(12), bad])


def chat(*messages: Any) -> Mistake:
    return given({"messages": list(messages)})


def nothing(here: Path) -> None:
    """The mistake is in the words of the command."""


USER = {"role": "user", "content": "hi"}
MODELS: Table = {
    "no folder": (nothing, ["model.path=./gone"], ["./gone: there is no such folder"]),
    "a file": (nothing, ["model.path=train.jsonl"], ["train.jsonl is a file", "config.json"]),
    "hub without network": (
        nothing,
        ["model.path=nobody/no-such-model"],
        ["nobody/no-such-model", "hub cannot be reached", "give the folder's path"],
    ),
    "no config": (remove("base/config.json"), [], ["base/config.json"]),
    "broken config": (write("base/config.json", "{"), [], ["base/config.json", "JSON"]),
    "unknown type": (config(model_type="mamba"), [], ["base/config.json", "model_type", "'mamba'", "llama"]),
    "unknown field": (config(attention_multiplier=2.0), [], ["base/config.json: attention_multiplier = 2.0"]),
    "no size": (config(hidden_size=None), [], ["base/config.json: hidden_size", "missing"]),
    "text for a size": (config(num_hidden_layers="two"), [], ["num_hidden_layers = 'two'", "positive integer"]),
    "unknown rope": (
        config(rope_parameters={"rope_type": "longrope", "factor": 2.0}),
        [],
        ["rope_parameters.rope_type = 'longrope'", "not supported"],
    ),
    "no weights": (remove(f"base/{WEIGHTS}"), [], ["base holds no weights", WEIGHTS]),
    "garbage": (write(f"base/{WEIGHTS}", b"\x07" * 500), [], [f"base/{WEIGHTS} is not a whole safetensors file"]),
    "truncated": (cut(f"base/{WEIGHTS}", -40), [], [f"base/{WEIGHTS} is not a whole safetensors file", "again"]),
    "empty weights": (write(f"base/{WEIGHTS}", ""), [], [f"base/{WEIGHTS} is not a whole safetensors file"]),
    "pickles": (pickled, [], ["pytorch_model.bin", "loads no pickles", "save_pretrained"]),
    "missing shard": (missing_shard, [], ["base/model-2.safetensors is missing", "index.json"]),
    "incomplete shard": (incomplete_shard, [], ["model-2.safetensors lacks", "index.json says that it holds"]),
    "missing tensor": (tensors(lambda found: found.pop(QUERY)), [], ["1 tensor(s)", "missing", QUERY]),
    "extra tensor": (
        tensors(lambda found: found.update(mystery=np.zeros(3, np.float32))),
        [],
        ["1 tensor(s)", "no place for: mystery"],
    ),
    "wrong shape": (
        tensors(lambda found: found.update({QUERY: np.zeros((32, 16), np.float32)})),
        [],
        [QUERY, "expected (32, 32), found (32, 16)"],
    ),
    "integers": (tensors(lambda found: found.update({QUERY: np.zeros((32, 32), np.int8)})), [], [QUERY, "I8", "BF16"]),
    "more layers": (config(num_hidden_layers=1), [], ["more layers than num_hidden_layers = 1", "model.layers.1."]),
    "fewer layers": (config(num_hidden_layers=3), [], ["missing", "model.layers.2."]),
    "a run without export": (
        write("old/recipe.yaml", "model: {}"),
        ["model.path=old"],
        ["old has exported nothing yet", "tunix export"],
    ),
}
TOKENIZERS: Table = {
    "no tokenizer": (no_tokenizer, [], ["row 1 of train.jsonl", "has no tokenizer", "input_ids"]),
    "no template": (
        lambda here: [
            chat(USER, {"role": "assistant", "content": "yo"})(here),
            remove("base/chat_template.jinja")(here),
        ],
        [],
        ["row 1 of train.jsonl", "base has no chat template", "data.chat_template"],
    ),
    "too large": (large_tokenizer, [], ["400 ids, the model only 272"]),
    "broken": (write("base/tokenizer.json", "{}"), [], ["base: the tokenizer does not load"]),
    "no vocabulary": (
        remove("base/tokenizer.json"),
        [],
        ["base has a tokenizer_config.json", "tokenizer.json is missing"],
    ),
    "broken generation config": (
        write("base/generation_config.json", "{"),
        [],
        ["base/generation_config.json is not JSON"],
    ),
    "template of another family": (
        nothing,
        ["data.chat_template=chatml"],
        ["data.chat_template is 'chatml'", "<|im_start|>"],
    ),
    "unknown template": (nothing, ["data.chat_template=gema"], ["'gema'", "Did you mean 'gemma'?"]),
    "template without tokenizer": (
        no_tokenizer,
        ["data.chat_template=llama3"],
        ["data.chat_template", "without a tokenizer"],
    ),
    "template that fails": (
        lambda here: [
            chat(USER, {"role": "assistant", "content": "yo"})(here),
            write("t.jinja", "{{ raise_exception('no') }}")(here),
        ],
        ["data.chat_template=t.jinja"],
        ["row 1 of train.jsonl", "refuses the conversation: no"],
    ),
    "too small for bpe": (
        nothing,
        ["model={init: random, family: llama, sizes: {vocab_size: 100}, tokenizer: bpe}"],
        ["bpe tokenizer", "not 100"],
    ),
}
DATA: Table = {
    "no file": (remove("train.jsonl"), [], ["train.jsonl: there is no such file"]),
    "empty file": (write("train.jsonl", ""), [], ["train.jsonl is empty"]),
    "blank lines": (write("train.jsonl", "\n\n"), [], ["train.jsonl is empty"]),
    "not JSON": (write("train.jsonl", '{"text": "a"}\n{"text": \n'), [], ["train.jsonl, line 2 is not JSON"]),
    "not an object": (
        write("train.jsonl", "[1, 2]\n"),
        [],
        ["train.jsonl: element 1 of its array is 1, not an object"],
    ),
    "no known column": (
        given({"question": "a", "answr": "b"}),
        [],
        ["row 1 of train.jsonl has the columns 'question', 'answr'", "data.columns"],
    ),
    "no column": (
        later({"prompt": "a", "completions": "b"}),
        [],
        ["row 13 of train.jsonl: there is no column 'completion'", "Did you mean 'completions'?"],
    ),
    "null": (
        later({"prompt": "a", "completion": None}),
        [],
        ["row 13 of train.jsonl: the column 'completion' is null"],
    ),
    "number for text": (given({"text": 3}), [], ["row 1 of train.jsonl: text is 3, not a string"]),
    "unknown our column": (
        nothing,
        ["data.columns={promt: question}"],
        ["data.columns maps 'promt'", "Did you mean 'prompt'?"],
    ),
    "no messages": (chat(), [], ["messages is []", "at least one message"]),
    "text for messages": (given({"messages": "hi"}), [], ["messages is 'hi', not a list"]),
    "unknown role": (
        chat({"role": "model", "content": "a"}),
        [],
        ["message 1 has the role 'model'", "Did you mean 'assistant'?"],
    ),
    "role in another key": (chat({"from": "user", "content": "a"}), [], ["message 1 has the role None"]),
    "no content": (chat(USER, {"role": "assistant", "content": None}), [], ["message 2 (assistant) has no content"]),
    "short labels": (given({"input_ids": [1, 2, 3], "labels": [1, 2]}), [], ["labels has 2 values for 3 input_ids"]),
    "shifted labels": (
        given({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}),
        [],
        ["labels[0] is 2, but input_ids[0] is 1", "unshifted"],
    ),
    "both masks": (given({"input_ids": [1, 2], "labels": [1, -100], "loss_mask": [1, 1]}), [], ["labels", "loss_mask"]),
    "id beyond": (
        given({"input_ids": [1, 272]}),
        [],
        ["row 1 of train.jsonl: token id 272 is beyond the model's vocabulary of 272"],
    ),
    "negative id": (given({"input_ids": [1, -5]}), [], ["input_ids holds -5"]),
    "fractional id": (given({"input_ids": [1.5]}), [], ["input_ids is [1.5], not a list of whole numbers"]),
    "negative weight": (
        later({"text": "a", "prompt": "a", "completion": "b", "weight": -1}),
        [],
        ["row 13 of train.jsonl: weight is -1"],
    ),
    "weight no number": (
        write("train.jsonl", '{"text": "abc", "weight": NaN}\n'),
        [],
        ["train.jsonl, line 1 is not JSON: NaN is no JSON value"],
    ),
    "all weights 0": (
        given(*({**one, "weight": 0} for one in rows(8))),
        [],
        ["train.jsonl: a whole batch of 8 rows has weight 0"],
    ),
    "too long": (
        later({"prompt": "a" * 50, "completion": "b"}),
        ["data.on_overflow=error"],
        ["row 13 of train.jsonl has 53 tokens", "data.max_length 48", "truncate or drop"],
    ),
    "nothing trained": (
        given(*[{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 9),
        [],
        ["train.jsonl: nothing in it can be trained on", "9 x nothing to train on"],
    ),
    "nothing held out": (
        write("held.jsonl", '{"input_ids": [5, 6], "labels": [-100, -100]}\n'),
        ["data.eval=held.jsonl"],
        ["held.jsonl: none of its first 1 rows can be evaluated"],
    ),
    "no held-out file": (nothing, ["data.eval=gone.jsonl"], ["gone.jsonl: there is no such file"]),
    "unknown split": (
        lambda here: [(here / "d").mkdir(), shutil.copy(here / "train.jsonl", here / "d/train.jsonl")],
        ["data.train=d", "data.split=trian"],
        ["d has no split 'trian'", "Did you mean 'train'?"],
    ),
    "unknown suffix": (
        write("rows.txt", "a,b\n"),
        ["data.train=rows.txt"],
        ["rows.txt: rows are read from .jsonl", "not from '.txt'"],
    ),
    "broken parquet": (
        write("rows.parquet", "PAR1"),
        ["data.train=rows.parquet"],
        ["rows.parquet is no whole .parquet file"],
    ),
    "broken arrow": (write("rows.arrow", "ARROW1"), ["data.train=rows.arrow"], ["rows.arrow is no whole .arrow file"]),
    "empty folder": (lambda here: (here / "d").mkdir(), ["data.train=d"], ["d holds no .jsonl"]),
    "hub without network": (
        nothing,
        ["data.train=nobody/no-such-rows"],
        ["nobody/no-such-rows", "neither a file here nor a dataset"],
    ),
    "function that returns text": (
        write("own.py", "def f(): return 'rows'"),
        ["data.train=own.py:f"],
        ["own.py:f gives 'rows'"],
    ),
    "no function": (write("own.py", "def f(): return []"), ["data.train=own.py:g"], ["own.py has no 'g'"]),
}
PLACES: Table = {
    "three devices": (
        nothing,
        ["mesh={fsdp: 3}"],
        ["mesh: {data: 1, fsdp: 3, context: 1, expert: 1, tensor: 1} does not fit 8 device(s)", "-1"],
    ),
    "a kernel of other devices": (
        nothing,
        ["model.attention=splash"],
        ["model.attention: splash cannot be used here: it needs a TPU", "Leave it at auto"],
    ),
    "parts of a row that are no blocks": (
        nothing,
        ["mesh={fsdp: 4, context: 2}", "data.max_length=33"],
        ["mesh: context 2 makes no whole blocks of 128 of rows of 33 tokens (data.max_length); 256 would do"],
    ),
    "too many devices": (
        nothing,
        ["mesh={data: 16, fsdp: -1}"],
        ["mesh: {data: 16, fsdp: -1, context: 1, expert: 1, tensor: 1} does not fit 8"],
    ),
    "more shards than kv heads": (
        nothing,
        ["mesh={fsdp: 2, tensor: 4}"],
        ["mesh: tensor 4 does not divide 2 kv heads; tensor 2 would", "{data: 1, fsdp: 8, tensor: 1}"],
    ),
    "fewer rows than shards": (
        nothing,
        ["batch_size=6"],
        ["rows are split over fsdp 8, but an update has 6 of them", "8 would do"],
    ),
    "micro-batches that the devices cannot share": (nothing, ["micro_batch_size=4"], ["no multiple of 8; 8 would do"]),
    "somebody's folder": (
        write("notes/thesis.txt", "all my work"),
        ["output=notes"],
        ["notes is not empty and holds no run"],
    ),
    "somebody's folder, fresh": (
        write("notes/thesis.txt", "all my work"),
        ["output=notes", "--fresh"],
        ["notes is not empty and holds no run"],
    ),
    "below a file": (
        nothing,
        ["output=train.jsonl/run"],
        ["output: train.jsonl/run cannot be written: Not a directory"],
    ),
    "a file": (nothing, ["output=train.jsonl"], ["output: train.jsonl cannot be written: it is a file"]),
    "nowhere": (nothing, ["output=/proc/run"], ["output: /proc/run cannot be written"]),
}
TABLES = {"model": MODELS, "tokenizer": TOKENIZERS, "data": DATA, "place": PLACES}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything as it should be."""
    folder = tmp_path_factory.mktemp("good")
    model_folder(folder / "base")
    (folder / "notes").mkdir()
    (folder / "old").mkdir()
    write_recipe(folder / "r.yaml", CHANGES)
    return folder


@pytest.fixture
def here(good: Path, tmp_path: Path) -> Path:
    """A copy of it to make a mistake in."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def trained(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a finished run in `run`: checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(good, folder, dirs_exist_ok=True)
    with standing_in(folder):
        train("r.yaml")
    return folder


@pytest.fixture
def done(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


@contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that has to stop cleanly."""
    capsys.readouterr()
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("error: ") == 1, err
    return err[err.index("error: ") :]


def assert_says(message: str, fragments: list[str]) -> None:
    assert all(fragment in message for fragment in fragments), message
    assert len(message) < 700, message


def outside(folder: Path) -> dict[str, bytes]:
    """What is the user's: all files but the run's."""
    return {name: data for name, data in files(folder).items() if not name.startswith("run/")}


@pytest.mark.parametrize(
    ("mistake", "words", "fragments"),
    [pytest.param(*row, id=f"{table}: {name}") for table, listed in TABLES.items() for name, row in listed.items()],
)
def test_a_run_that_cannot_begin_says_why(
    mistake: Mistake, words: list[str], fragments: list[str], here: Path, capsys: pytest.CaptureFixture[str]
):
    mistake(here)
    before = outside(here)
    assert_says(refused(["run", "r.yaml", *words], capsys), fragments)
    assert outside(here) == before


def test_a_mended_recipe_begins_in_the_same_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "run").mkdir()
    (here / "run/.lock").touch()
    (here / "run/recipe.yaml.tmp-12345678").touch()  # as a kill leaves it
    refused(["run", "r.yaml", "data.train=gone.jsonl"], capsys)
    write_rows(here / "short.jsonl", [*rows(3), {"prompt": "a"}])
    refused(["run", "r.yaml", "data.train=short.jsonl", "data.shuffle=false"], capsys)
    train("r.yaml", "steps=1")
    assert [one["step"] for one in metrics("run")] == [1]
    assert not list((here / "run").glob("*.tmp-*"))


# --- A folder that holds a run --------------------------------------------------------------------------------------


def test_the_run_of_another_recipe_is_left_alone(done: Path, capsys: pytest.CaptureFixture[str]):
    before = files(done)
    message = refused(["run", "r.yaml", "optimizer.learning_rate=1e-4", "seed=3"], capsys)
    assert_says(message, ["run holds the run of another recipe: optimizer.learning_rate, seed differ", "--fresh"])
    assert files(done) == before
    (done / "run/recipe.yaml").write_text("model: {")
    assert_says(refused(["run", "r.yaml"], capsys), ["run/recipe.yaml:"])


@pytest.mark.parametrize("words", [[], ["--fresh"]])
def test_two_processes_do_not_share_a_run(words: list[str], done: Path, capsys: pytest.CaptureFixture[str]):
    before = files(done)
    with (done / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = refused(["run", "r.yaml", "steps=6", *words], capsys)
    assert_says(message, ["run: another tunix process is running there", "wait"])
    assert files(done) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(done: Path, capsys: pytest.CaptureFixture[str]):
    whole = losses("run")
    stored = list((done / "run/checkpoints/4/state").rglob("d/*"))  # which of them hold weights is not known
    assert stored
    for file in stored:
        file.write_bytes(file.read_bytes()[:100])
    message = refused(["run", "r.yaml", "steps=5"], capsys)
    assert_says(message, ["run/checkpoints/4: the checkpoint cannot be read", "Delete that folder", "--fresh"])
    assert metrics("run")[-1]["step"] == 4
    assert_says(refused(["export", "run", "out"], capsys), ["run/checkpoints/4: the checkpoint cannot be read"])
    shutil.rmtree(done / "run/checkpoints/4")
    train("r.yaml")
    assert losses("run") == whole


@pytest.mark.parametrize("data", ["", "{", None])
def test_a_damaged_record_is_named(data: str | None, done: Path, capsys: pytest.CaptureFixture[str]):
    file = done / "run/checkpoints/4/record/metadata"
    file.unlink() if data is None else file.write_text(data)
    message = refused(["run", "r.yaml", "steps=5"], capsys)
    assert_says(message, ["run/checkpoints/4: the checkpoint cannot be read", "Delete that folder"])


def test_a_checkpoint_of_other_rows_or_another_model_is_refused(done: Path, capsys: pytest.CaptureFixture[str]):
    before = files(done / "run/checkpoints")
    write_rows(done / "train.jsonl", rows(20))
    message = refused(["run", "r.yaml", "steps=5"], capsys)
    assert_says(message, ["train.jsonl has 20 rows, but had 32 when the checkpoint was written", "--fresh"])
    write_rows(done / "train.jsonl", rows(32))
    shutil.rmtree(done / "base")
    model_folder(done / "base", intermediate_size=40)
    message = refused(["run", "r.yaml", "steps=5"], capsys)
    assert_says(message, ["run/checkpoints/4: the checkpoint cannot be read"])
    assert files(done / "run/checkpoints") == before


@pytest.mark.slow
def test_a_bad_row_late_in_the_data_keeps_what_was_trained(done: Path, capsys: pytest.CaptureFixture[str]):
    good = (done / "train.jsonl").read_text()
    train("r.yaml", "data.shuffle=false", "--fresh", "steps=4", "checkpoint.every=100")
    whole = losses("run")
    write_rows(done / "train.jsonl", [*rows(28), {"prompt": "a"}, *rows(3)])
    words = ["run", "r.yaml", "data.shuffle=false", "checkpoint.every=100"]
    message = refused([*words, "--fresh"], capsys)
    assert_says(message, ["row 29 of train.jsonl: there is no column 'completion'"])
    assert os.listdir("run/checkpoints") == ["3"]
    # The rows are others now, so that the run does not go on with them; what was trained is there.
    (done / "train.jsonl").write_text(good)
    assert_says(refused(words, capsys), ["train.jsonl has as many rows as when the checkpoint was written, but others"])
    assert main(["export", "run", "out"]) == 0
    assert losses("run") == whole[:3]


def test_a_loss_that_is_no_number_stops_before_it_is_saved(here: Path, capsys: pytest.CaptureFixture[str]):
    # In the third batch 5 nats x 4 tokens x 5e37 are more than a float32 holds.
    write_rows(here / "train.jsonl", [*rows(16), {**rows(1)[0], "weight": 5e37}, *rows(15)])
    message = refused(["run", "r.yaml", "data.shuffle=false"], capsys)
    assert_says(message, ["step 3: train/loss is inf", "checkpoints before it are intact", "optimizer.learning_rate"])
    assert os.listdir("run/checkpoints") == ["2"]
    assert [one["step"] for one in metrics("run")] == [1, 2]
    assert main(["export", "run", "out"]) == 0
    assert all(np.isfinite(x).all() for x in load_file(here / "out" / WEIGHTS).values())


def settle(folder: Path) -> None:
    """Waits until nothing below a folder changes: threads of a failed save, which end with its process elsewhere."""
    before = None
    while (now := sorted(folder.rglob("*"))) != before:
        before = now
        time.sleep(0.5)


@pytest.mark.slow
def test_a_full_disk_stops_a_save_and_the_run_goes_on_when_there_is_room(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    train("r.yaml", "output=whole", "steps=8")
    before = [files(done / f"run/checkpoints/{step}") for step in (2, 4)]
    with full_disk(20_000):
        message = refused(["run", "r.yaml", "steps=8"], capsys)
    assert_says(
        message,
        ["run/checkpoints: a checkpoint could not be written", "Make room", "same command", "of step 4 is kept"],
    )
    assert [files(done / f"run/checkpoints/{step}") for step in (2, 4)] == before
    settle(done / "run/checkpoints")
    train("r.yaml", "steps=8")
    assert losses("run") == losses("whole")
    assert files(done / "run/export") == files(done / "whole/export")


@pytest.mark.slow  # a full disk in a save stays
def test_a_full_disk_stops_everything_else_too(done: Path, capsys: pytest.CaptureFixture[str]):
    with full_disk(20_000):
        assert_says(refused(["export", "run", "out"], capsys), ["could not write", "out", "File too large"])
    assert not (done / "out").exists()
    with full_disk(200):
        assert_says(refused(["run", "r.yaml", "output=other"], capsys), ["other/recipe.yaml", "File too large"])
        message = refused(["score", "base", "train.jsonl", "--out", "scores.jsonl"], capsys)
        assert_says(message, ["scores.jsonl", "File too large"])
    assert not (done / "scores.jsonl").exists()
    train("r.yaml", "steps=40")  # until the metrics are longer than all else
    size = (done / "run/metrics.jsonl").stat().st_size
    assert size > (done / "run/recipe.yaml").stat().st_size
    with full_disk(size + 10):
        message = refused(["run", "r.yaml", "steps=44"], capsys)
        assert_says(message, ["metrics.jsonl could not be written", "Make room"])
    train("r.yaml", "steps=44")
    assert [one["step"] for one in metrics("run")] == list(range(1, 45))


# --- Export and score -----------------------------------------------------------------------------------------------

EXPORTS: Table = {
    "no run": (nothing, ["base", "out"], ["base is no run folder: it has no recipe.yaml"]),
    "taken": (
        write("notes/thesis.txt", "all my work"),
        ["run", "notes"],
        ["notes is there already", "nothing is overwritten"],
    ),
    "taken by a file": (nothing, ["run", "train.jsonl"], ["train.jsonl is there already"]),
    "below a file": (nothing, ["run", "train.jsonl/out"], ["could not write", "train.jsonl/out"]),
    "unknown step": (nothing, ["run", "out", "--step", "3"], ["run has no checkpoint of step 3; it has [2, 4]"]),
    "no adapter": (nothing, ["run", "out", "--adapter"], ["there is no adapter to export", "leave --adapter out"]),
    "no checkpoint": (
        lambda here: shutil.rmtree(here / "run/checkpoints"),
        ["run", "out"],
        ["run has no checkpoint; it has []"],
    ),
    "base gone": (lambda here: shutil.rmtree(here / "base"), ["run", "out"], ["base", "hub cannot be reached"]),
}


@pytest.mark.parametrize(("mistake", "words", "fragments"), EXPORTS.values(), ids=EXPORTS)
def test_an_export_that_cannot_be_made_says_why(
    mistake: Mistake, words: list[str], fragments: list[str], done: Path, capsys: pytest.CaptureFixture[str]
):
    mistake(done)
    before = files(done)
    assert_says(refused(["export", *words], capsys), fragments)
    assert files(done) == before


def adapter(here: Path, change: Callable[[dict[str, Any]], Any] = lambda said: None, wide: int = 32) -> None:
    """A PEFT folder `adapter` on the query projections."""
    (here / "adapter").mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    change(said)
    (here / "adapter/adapter_config.json").write_text(json.dumps(said))
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    pairs = {stem.format(i, "A"): np.ones((2, wide), np.float32) for i in range(2)}
    pairs |= {stem.format(i, "B"): np.ones((32, 2), np.float32) for i in range(2)}
    save_file(pairs, here / "adapter/adapter_model.safetensors")


def ended_in_an_adapter(here: Path) -> None:
    adapter(here, lambda said: said.update(base_model_name_or_path=str(here / "base")))
    (here / "old/recipe.yaml").write_text("{}")
    shutil.copytree(here / "adapter", here / "old/export")


SCORES: Table = {
    "taken": (write("scores.jsonl", "precious"), ["base", "train.jsonl"], ["scores.jsonl exists already", "--out"]),
    "nowhere": (
        nothing,
        ["base", "train.jsonl", "--out", "gone/s.jsonl"],
        ["--out gone/s.jsonl: there is no folder", "gone"],
    ),
    "no model": (nothing, ["./gone", "train.jsonl"], ["./gone: there is no such folder"]),
    "no rows": (nothing, ["base", "gone.jsonl"], ["gone.jsonl: there is no such file"]),
    "one token": (
        given({"input_ids": [5, 6]}, {"input_ids": [5]}),
        ["base", "train.jsonl"],
        ["row 2 of train.jsonl: nothing to score", "two tokens"],
    ),
    "too long": (
        given({"input_ids": list(range(5, 25))}),
        ["base", "train.jsonl", "--max-length", "16"],
        ["row 1 of train.jsonl has 20 tokens, more than max_length (--max-length) 16", "raise it"],
    ),
    "id beyond": (
        given({"input_ids": [5, 999]}),
        ["base", "train.jsonl"],
        ["token id 999 is beyond the model's vocabulary of 272"],
    ),
    "text without tokenizer": (
        no_tokenizer,
        ["base", "train.jsonl"],
        ["row 1 of train.jsonl", "no tokenizer", "input_ids"],
    ),
    "no adapter": (nothing, ["base", "train.jsonl", "--adapter", "gone"], ["gone/adapter_config.json"]),
    "no adapter weights": (
        lambda here: [adapter(here), remove("adapter/adapter_model.safetensors")(here)],
        ["base", "train.jsonl", "--adapter", "adapter"],
        ["adapter/adapter_model.safetensors is missing"],
    ),
    "adapter of another base": (
        lambda here: adapter(here, wide=64),
        ["base", "train.jsonl", "--adapter", "adapter"],
        ["q_proj.lora_A.weight expected (2, 32), found (2, 64)", "Is this the base of the adapter? It names none."],
    ),
    "other kind": (
        lambda here: adapter(here, lambda said: said.update(peft_type="IA3")),
        ["base", "train.jsonl", "--adapter", "adapter"],
        ["adapter_config.json: peft_type = 'IA3'", "LORA"],
    ),
    "dora without magnitudes": (
        lambda here: adapter(here, lambda said: said.update(use_dora=True)),
        ["base", "train.jsonl", "--adapter", "adapter"],
        ["2 tensor(s)", "q_proj.lora_magnitude_vector", "4 are there, 6 are needed"],
    ),
    "adapter on an adapter": (
        ended_in_an_adapter,
        ["old", "train.jsonl", "--adapter", "adapter"],
        ["old", "already ends in an adapter", "tunix export"],
    ),
}


@pytest.mark.parametrize(("mistake", "words", "fragments"), SCORES.values(), ids=SCORES)
def test_a_score_that_cannot_be_made_says_why(
    mistake: Mistake, words: list[str], fragments: list[str], here: Path, capsys: pytest.CaptureFixture[str]
):
    mistake(here)
    before = files(here)
    out = [] if "--out" in words else ["--out", "scores.jsonl"]
    assert_says(refused(["score", *words, *out], capsys), fragments)
    assert files(here) == before
