"""A real MaxText: it loads what tunix exports, and tunix imports what it saves; the logits are transformers'.

Slow, and skipped where there is none: TUNIX_MAXTEXT names the Python of its environment. One that runs on a CPU,
without what MaxText's extras ask for on TPUs and in Google Cloud:

    python3.12 -m venv maxtext-env
    maxtext-env/bin/pip install --no-deps maxtext==0.2.5
    maxtext-env/bin/pip install jax==0.12.0.1 flax==0.12.12 orbax-checkpoint==0.12.8 transformers qwix aqtp tokamax
    maxtext-env/bin/pip install datasets drjax grain jinja2 omegaconf pathwaysutils pillow psutil pydantic
    maxtext-env/bin/pip install sentencepiece sympy tensorboardX tiktoken
    TUNIX_MAXTEXT=maxtext-env/bin/python pytest -m slow tests/interop/test_real_maxtext.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.interop.by_hand import LLAMA31
from tests.tiny_models import randomise
from tunix.interop.maxtext import export_maxtext, import_maxtext

PYTHON = os.environ.get("TUNIX_MAXTEXT")
WHY = "set TUNIX_MAXTEXT to the Python of an environment with MaxText"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason=WHY)]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
GEMMA2 = {"num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 12, "tie_word_embeddings": True}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
GEMMA3 = {**GEMMA2, "num_hidden_layers": 8, "query_pre_attn_scalar": 16, "rope_parameters": ROPES}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-3, "rope_theta": 5000.0}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": {**ROPES["full_attention"]}}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA31}),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2 uncapped": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 27b": ("gemma3_text", {**GEMMA3, "head_dim": 32, "num_hidden_layers": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "rope_theta": 5000.0, "rms_norm_eps": 1e-3}),
}
"""Of each family what MaxText has a setting for, with other values than its own."""
APART = ("llama", "llama 3.1", "gemma2", "gemma3", "qwen2", "qwen3")
"""Those that are also tried with each layer's arrays apart."""
TOKENS = np.random.default_rng(0).integers(0, 128, 32).tolist()


class Case(NamedTuple):
    """One model, its layers scanned or not."""

    name: str
    scanned: bool

    def folder(self, root: Path) -> Path:
        """Where everything of it is."""
        return root / f"{self.name}, {'scanned' if self.scanned else 'apart'}".replace(" ", "_")


EVERY = [Case(name, True) for name in CASES] + [Case(name, False) for name in APART]


def write(folder: Path, name: str) -> None:
    """A random model, in numbers that bfloat16 has: MaxText makes such of an embedding that is the head, too."""
    family, fields = CASES[name]
    config = AutoConfig.for_model(family, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.bfloat16().float().save_pretrained(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each case `here`, a model; `exported`, and MaxText's logits of it; `theirs`, a checkpoint, and its logits."""
    root, jobs = tmp_path_factory.mktemp("maxtext"), []
    for case in EVERY:
        folder = case.folder(root)
        write(folder / "here", case.name)
        loaded, *model = export_maxtext(folder / "here", folder / "exported", scanned=case.scanned).split()
        jobs.append({"settings": [loaded, *model], "logits": str(folder / "exported.npy")})
        jobs.append({"settings": model, "logits": str(folder / "theirs.npy"), "save": str(folder / "theirs")})
    (root / "jobs.json").write_text(json.dumps([{**job, "tokens": TOKENS} for job in jobs]))
    assert PYTHON is not None
    command = [PYTHON, str(Path(__file__).with_name("maxtext_program.py")), str(root / "jobs.json")]
    rest = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=rest, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def logits(folder: Path) -> np.ndarray:
    """transformers' logits of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.folder(Path()).name)
def test_maxtext_loads_what_is_exported_by_the_settings_that_are_printed(case: Case, root: Path):
    folder = case.folder(root)
    np.testing.assert_allclose(np.load(folder / "exported.npy"), logits(folder / "here"), atol=1e-4)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.folder(Path()).name)
def test_checkpoints_of_maxtext_are_imported(case: Case, root: Path, tmp_path: Path):
    folder = case.folder(root)
    import_maxtext(folder / "theirs", tmp_path / "back", like=folder / "here")
    np.testing.assert_allclose(logits(tmp_path / "back"), np.load(folder / "theirs.npy"), atol=1e-4)
