"""A run with an adapter, out in every format and from the command line: they hold the same merged weights."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tunix
from tests.interop import by_hand
from tests.tiny_runs import model_folder, train, write_recipe
from tunix.cli import main

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps in `run`, and its merged weights in `merged`."""
    here = tmp_path_factory.mktemp("formats")
    model_folder(here / "base")
    sections = {"model": {"path": str(here / "base"), "dtype": "float32"}, "adapter": {"rank": 2}, "steps": 2}
    write_recipe(here / "r.yaml", {**sections, "data.train": str(here / "train.jsonl")})
    train(str(here / "r.yaml"), f"output={here / 'run'}")
    assert main(["export", str(here / "run"), str(here / "merged")]) == 0
    return here


@pytest.mark.slow
def test_to_maxtext_and_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(run / "run"), str(run / "there"), "--format", "maxtext", "--step", "2"]) == 0
    settings = (
        f"load_parameters_path={run / 'there'}/0/items model_name=llama3-8b override_model_config=true scan_layers=true"
    )
    assert settings in capsys.readouterr().out
    assert main(["import", f"maxtext:{run / 'there'}", str(tmp_path / "back")]) == 0
    back, merged = (load_file(one / "model.safetensors") for one in (tmp_path / "back", run / "merged"))
    assert back.keys() == merged.keys()
    for name, expected in merged.items():
        # Queries were divided by the root of 8 and multiplied by it again.
        np.testing.assert_allclose(back[name], expected, rtol=3e-7 if "q_proj" in name else 0, atol=0)
    base = load_file(run / "base" / "model.safetensors")
    assert any(np.any(base[name] != back[name]) for name in base if "v_proj" in name)
    assert not list(run.glob("*.tmp-*"))
    assert tunix.load(tmp_path / "back").tokenizer is not None


def test_a_model_folder_needs_no_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "deep" / "there"
    words = ["export", str(run / "merged"), str(out), "--format", "maxtext", "--unscanned"]
    assert main(words) == 0
    assert "scan_layers=false" in capsys.readouterr().out
    assert "decoder/layers_1/mlp/wo/kernel" in by_hand.arrays_of(out / "0" / "items")
    assert main([*words[:2], str(tmp_path / "other"), *words[3:], "--step", "2"]) == 2
    assert "is no run folder, and has no checkpoints" in capsys.readouterr().err
    assert main(["export", str(run / "run"), str(out), "--format", "maxtext"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    like = ["--like", str(run / "merged"), "--dtype", "bfloat16"]
    assert main(["import", f"maxtext:{out / '0'}", str(tmp_path / "back"), *like]) == 0
    assert {array.dtype.name for array in load_file(tmp_path / "back" / "model.safetensors").values()} == {"bfloat16"}


def test_to_stablehlo(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("flatbuffers", reason="jax writes exported programs with it: pip install '.[test]'")
    from tunix.interop import standalone

    out = tmp_path / "programs"
    words = ["export", str(run / "run"), str(out), "--format", "stablehlo"]
    assert main(words) == 2
    assert "--length 1024: the model ends at 128 tokens" in capsys.readouterr().err
    assert main([*words, "--batch", "2", "--prompt-length", "64", "--length", "96"]) == 0
    assert f"python {out}/generate.py" in capsys.readouterr().out
    greedy = tunix.Sampling(max_tokens=12, temperature=0.0)
    answer = tunix.load(run / "merged").generate([65, 66, 67], sampling=greedy)[0]
    assert standalone.generate(out, [[65, 66, 67]], 12) == [answer.completion.tokens.tolist()]
    assert not list(tmp_path.glob("*.tmp-*"))
