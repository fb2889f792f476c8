"""An adapter knows its base again: saved in another dtype, moved a little, or another one altogether."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_runs import lines, model_folder, train, write_recipe
from tunix.cli import main
from tunix.errors import UserError
from tunix.hf.peft_folder import FILE, distance, fingerprint, foreign_base
from tunix.models.families.table import read_config

pytestmark = pytest.mark.models


def saved(path: Path, change) -> Path:
    """The base, changed and saved again."""
    model = AutoModelForCausalLM.from_pretrained("base")
    change(model)
    model.save_pretrained(path)
    return path


def moved(share: float):
    """Adds so much noise to each matrix, by its own size."""

    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for weight in (weight for weight in model.parameters() if weight.ndim == 2):
                weight.add_(share * weight.std() * torch.randn_like(weight))

    return change


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT folder on `base` that knows it; both are in the current folder."""
    model_folder(tmp_path / "base")
    torch.manual_seed(0)
    settings = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), settings).save_pretrained("adapter")
    base = tmp_path / "base"
    (tmp_path / "adapter" / FILE).write_text(fingerprint(str(base), base, read_config(base), None))
    return tmp_path / "adapter"


def told(adapter: Path, folder: Path) -> str:
    return foreign_base(adapter, str(folder.resolve()), folder, read_config(folder))


def test_the_distance_by_hand():
    one = np.array([[3, 4, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 2], [0] * 8], np.float32)
    other = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0] * 8], np.float32)
    # |a - b| is 5, 1 and 0, the larger of the two is 5 long, 2 and 0
    assert distance(one, other) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert distance(one, one) == 0
    rng = np.random.default_rng(0)
    independent = (rng.standard_normal((500, 8), np.float32) for _ in range(2))
    assert 1.1 < distance(*independent) < 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_base_that_was_saved_again_is_the_same(adapter: Path, dtype):
    again = saved(Path("again"), lambda model: model.to(dtype))
    assert told(adapter, again) == ""


def test_a_base_that_was_fine_tuned_is_noted(adapter: Path):
    assert told(adapter, saved(Path("tuned"), moved(0.002))) == ""
    note = told(adapter, saved(Path("more"), moved(0.1)))
    assert note.startswith(f"note: {adapter} was trained on {Path('base').resolve()} and is put on")
    share = int(note.split("moved by ")[1].rstrip("%"))
    assert 7 <= share <= 13  # noise of a tenth, estimated from eight numbers of a matrix


def test_another_base_is_refused_with_the_remedy(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model_folder(tmp_path / "other", seed=1)
    words = ["score", "other", "rows.jsonl", "--adapter", "adapter", "--out", "scores.jsonl"]
    Path("rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7]}) + "\n")
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    base, other = (tmp_path / name for name in ("base", "other"))
    assert f"adapter was trained on {base} and is put on {other}: the shapes fit, but the matrices have" in said
    assert f"if these weights are meant, remove adapter/{FILE}" in said
    assert not Path("scores.jsonl").exists()
    shutil.copytree("adapter", "second")
    assert main(["generate", "other", "hi", "--adapter", "adapter", "--adapter", "second"]) == 2
    assert "the matrices have nothing in common" in " ".join(capsys.readouterr().err.split())
    Path("adapter", FILE).unlink()
    assert main(words) == 0
    assert f"note: adapter was trained on base and is put on {other}" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_fingerprint_is_reported(adapter: Path):
    for text in ('{"base": "x"}', '{"base": "x", "numbers": "?"}', '{"base": "x", "numbers": "AAAA"}'):
        (adapter / FILE).write_text(text)
        with pytest.raises(UserError, match=rf"{FILE} is damaged .*: copy the adapter again, or remove this file"):
            told(adapter, Path("base"))
    (adapter / FILE).write_text("{")
    with pytest.raises(UserError, match=rf"{FILE} is not valid JSON"):
        told(adapter, Path("base"))


@pytest.mark.slow  # the fingerprint itself, and what is said of another base, stay
def test_a_run_marks_its_adapter_and_notices_when_its_base_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model_folder(tmp_path / "base")
    changes = {"model": {"path": "base", "dtype": "float32"}, "adapter": {"rank": 4}, "steps": 1}
    train(str(write_recipe(tmp_path / "r.yaml", changes)))
    export = tmp_path / "run/export"
    assert told(export, tmp_path / "base") == ""
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), export)  # a warning would be an error
    # The folder of the adapter stands for its base with it, as the run does.
    for name in ("run", "run/export"):
        assert main(["score", name, "held.jsonl", "--out", f"{name.replace('/', '_')}.jsonl"]) == 0
    assert lines(Path("run.jsonl")) == lines(Path("run_export.jsonl"))
    shutil.rmtree("base")
    model_folder(tmp_path / "base", seed=1)
    capsys.readouterr()
    assert main(["score", "run", "held.jsonl", "--out", "again.jsonl"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"was trained on {tmp_path / 'base'} and its weights are others now: the shapes fit" in said


def test_an_adapter_in_the_place_of_a_model_has_to_name_its_base(adapter: Path, capsys: pytest.CaptureFixture[str]):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    assert main(["generate", "adapter", "hi"]) == 2
    assert "is an adapter that names no base: give the base, and --adapter adapter" in capsys.readouterr().err
