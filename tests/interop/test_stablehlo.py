"""Exported programs against the sampler: the script that goes along runs in a process that cannot import tunix."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax import export
from safetensors.numpy import load_file, save_file

import tunix
from tests.marks import slow
from tests.tiny_models import CASES, EACH, HEAVY, reference_folder
from tests.tiny_runs import model_folder
from tunix.errors import UserError
from tunix.interop import stablehlo, standalone
from tunix.interop.stablehlo import Shapes, export_stablehlo

pytestmark = pytest.mark.models

SHAPES = Shapes(batch=3, prompt=64, length=96)
PROMPTS = [[5, 6, 7, 8, 9, 3, 4], [11, 4, 30] * 20, [1]]
"""Shorter than a chunk of the states and longer than one, longer than the windows; the last as short as can be."""
flatbuffers = pytest.importorskip("flatbuffers", reason="jax writes exported programs with it: pip install '.[test]'")


def alone(folder: Path, prompts: list[list[int]], most: int) -> subprocess.CompletedProcess[str]:
    """Runs the script of an export where `import tunix` fails."""
    forbidden = folder.parent / "forbidden"
    forbidden.mkdir(exist_ok=True)
    (forbidden / "tunix.py").write_text("raise ImportError('not without tunix')\n")
    paths = [str(forbidden), *filter(None, [str(Path(flatbuffers.__file__).parents[1])])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, str(folder / "generate.py"), json.dumps(prompts), "--max-tokens", str(most)]
    return subprocess.run(words, capture_output=True, text=True, env=env, cwd=folder)


def greedy(folder: Path, dtype="float32") -> list[list[int]]:
    """The sampler's tokens."""
    answers = tunix.load(folder, dtype=dtype).generate(PROMPTS, sampling=tunix.Sampling(max_tokens=24, temperature=0.0))
    return [answer.completion.tokens.tolist() for answer in answers]


@pytest.mark.parametrize("case", slow((*EACH, *HEAVY, "qwen3_5-alone-key-heads")))
def test_the_same_tokens_without_tunix(case, tmp_path):
    folder, out = tmp_path / "here", tmp_path / "out"
    reference_folder(CASES[case], folder)
    command = export_stablehlo(folder, out, shapes=SHAPES)
    assert str(out / "generate.py") in command
    done = alone(out, PROMPTS, 24)
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), greedy(folder)
    assert found == expected
    assert len({tuple(answer) for answer in found}) > 1
    for name in ("prefill", "decode"):
        exported = export.deserialize(bytearray((out / f"{name}.bin").read_bytes()))
        assert exported.platforms == ("cpu", "tpu", "cuda")
        assert "custom_call" not in exported.mlir_module()


@pytest.mark.slow
def test_in_bfloat16_too(tmp_path):
    folder = model_folder(tmp_path / "here")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    export_stablehlo(folder, tmp_path / "out", shapes=SHAPES)
    done = alone(tmp_path / "out", PROMPTS, 24)
    assert json.loads(done.stdout) == greedy(folder, "bfloat16")


def test_stop_ids_end_a_row_and_what_does_not_fit_is_told(tmp_path):
    folder, out = model_folder(tmp_path / "here"), tmp_path / "out"
    export_stablehlo(folder, out, shapes=SHAPES)
    description: dict = json.loads((out / "description.json").read_text())
    assert (description["batch"], description["length"]) == (3, 96)
    assert (out / "tokenizer.json").is_file()
    expected = greedy(folder)
    second = expected[0][1]
    (out / "description.json").write_text(json.dumps({**description, "stop_ids": [second]}))
    cut = [answer[: answer.index(second) + 1] if second in answer else answer for answer in expected]
    assert standalone.generate(out, PROMPTS, 24) == cut
    for prompts, most, words in (
        ([[1]] * 4, 4, "4 prompts, and the programs have 3 row(s)"),
        ([[1] * 65], 4, "a prompt of 65 tokens; from 1 to 64 fit"),
        ([[1] * 60], 40, "60 + 40 tokens, and 96 fit"),
        ([[1, 10_000]], 4, "outside of the vocabulary"),
    ):
        with pytest.raises(SystemExit, match=rf"^error: .*{re.escape(words)}"):
            standalone.check(description, prompts, most)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (Shapes(1, 65, 96), "--prompt-length 65 is not a multiple of 64"),
        (Shapes(1, 64, 64), "--length 64 leaves no token"),
        (Shapes(1, 64, 129), "the model ends at 128 tokens"),
    ],
)
def test_sizes_that_do_not_fit(shapes, words, tmp_path):
    folder = model_folder(tmp_path / "here")
    with pytest.raises(UserError, match=words):
        export_stablehlo(folder, tmp_path / "out", shapes=shapes)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_told(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "here")
    with pytest.raises(UserError, match="nothing is overwritten"):
        export_stablehlo(folder, folder, shapes=SHAPES)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": np.zeros((1, 32), np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="is a reward model"):
        export_stablehlo(folder, tmp_path / "out", shapes=SHAPES)
    monkeypatch.setattr(stablehlo, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[stablehlo\]'"):
        export_stablehlo(folder, tmp_path / "out", shapes=SHAPES)
    assert not (tmp_path / "out").exists()
