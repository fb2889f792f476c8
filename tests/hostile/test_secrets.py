"""What is secret in the environment, or in an address, is in no file and no output of a run."""

import json
from pathlib import Path

import pytest

from tests.tiny_runs import model_folder, write_recipe
from tunix.cli import main
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe

SECRETS = (
    *("WANDB_API_KEY", "HF_TOKEN", "TINKER_API_KEY", "TUNIX_API_KEY", "OPENAI_API_KEY", "JUDGE_KEY", "TEACHER_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "GOOGLE_API_KEY", "MLFLOW_TRACKING_PASSWORD"),
)


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    values = [f"canary{number:02d}x7f3a9c5e1b8d2460f" for number in range(len(SECRETS))]
    for name, value in zip(SECRETS, values, strict=True):
        monkeypatch.setenv(name, value)
    return values


def holders(folder: Path, secrets: list[str]) -> list[str]:
    """The files below a folder that have a secret in their name or content."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files for word in secrets if word.encode() in file.read_bytes() or word in str(file)]


def test_a_search_would_find_one(tmp_path: Path, canaries: list[str]):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.bin").write_bytes(b"\0\xff" + canaries[3].encode() + b"\0")
    assert holders(tmp_path, canaries) == [str(tmp_path / "a/b.bin")]


def test_nothing_secret_is_left_by_a_run(
    tmp_path: Path, canaries: list[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """A run, its report, its check, and runs that fail: in validation, in their data, and half-way."""
    model_folder(tmp_path / "base")
    recipe = str(write_recipe(tmp_path / "r.yaml", {"steps": 2, "logging.tensorboard": True}))
    assert main(["run", recipe, "-v"]) == 0
    assert main(["report", "run", "--out", "page.html"]) == 0
    assert main(["check", recipe, "--all"]) == 0
    assert main(["run", recipe, "output=run2", "steps=tow"]) == 2
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": 1}) + "\n")
    assert main(["run", recipe, "output=run3", "data.train=bad.jsonl"]) == 2
    assert main(["run", recipe, "output=run4", "optimizer.learning_rate=1e30", "steps=5"]) in (0, 2)
    judge = "{judge: {model: 'http://127.0.0.1:9/v1', rubric: r.md, key_variable: JUDGE_KEY}}"
    assert main(["run", recipe, "output=run5", f"reward={judge}"]) == 2
    written = capfd.readouterr()
    for text in (written.out, written.err, caplog.text):
        assert not [word for word in canaries if word in text]
    assert Path("page.html").is_file()
    assert holders(tmp_path, canaries) == []


@pytest.mark.parametrize(
    "override",
    [
        "rollout.servers=['http://me:hunter2@host:8000']",
        "reward.judge.model=http://me:hunter2@host/v1",
        "reward.judge.model=http://me:hunter2@host",
        "teacher.path=http://me:hunter2@host/v1",
        "data.train=https://me:hunter2@host/rows.jsonl",
        "data.train=s3://me:hunter2@bucket/rows.jsonl",
        "model.path=https://hunter2@host/model",
        "output=s3://me:hunter2@bucket/run",
        "steps=http://me:hunter2@host",
        "http://me:hunter2@host=1",
        "x: http://me:hunter2@host",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_repeated(
    override: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    recipe = str(write_recipe(tmp_path / "r.yaml"))
    assert main(["run", recipe, override]) == 2
    assert main(["check", recipe, override]) == 2
    written = capfd.readouterr()
    assert "hunter2" not in written.out + written.err
    assert not list(tmp_path.glob("run*"))


def test_an_address_with_a_password_in_an_option_is_refused():
    sections = {"model": {"path": "a/b"}, "data": {"train": "r.jsonl"}, "output": "run"}
    where = {"name": "game.py:Game", "options": {"at": ["postgres://me:hunter2@base.example.com/x"]}}
    recipe = {**sections, "algorithm": {"name": "grpo"}, "rollout": {"environment": where}}
    with pytest.raises(UserError, match=r"rollout: the address of base\.example\.com/x has a password") as refused:
        Recipe.build(recipe)
    assert "hunter2" not in str(refused.value)


def test_messages_leave_passwords_out():
    assert str(UserError("a: 'http://me:hunter2@host/v1' is b@c")) == "a: 'http://...@host/v1' is b@c"
    assert str(UserError("git+https://hunter2@host/x")) == "git+https://...@host/x"
    assert str(UserError("http://host/a@b")) == "http://host/a@b"
