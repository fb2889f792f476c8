"""A real vLLM: runs whose completions it samples, and what it makes of folders that tunix exports.

Slow, and skipped where there is none: TUNIX_VLLM names the Python of its environment (`benchmarks/servers.py`).
"""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.servers import PYTHON, WHY, ours, real
from tests.hf.test_stops import CHAT, TURNS
from tests.real_vllm import FAMILIES, MIXTURES, family_folder, greedy, likelihoods
from tests.run.test_rl_run import steps
from tests.tiny_models import randomise
from tests.tiny_rl import write_policy
from tests.tiny_runs import train, write_recipe, write_rows
from tunix.cli import main
from tunix.rollout.engine.experts import of_sequence
from tunix.rollout.servers import sampler
from tunix.rollout.servers.handover import Handover
from tunix.rollout.servers.protocol import read_experts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason=WHY)]

LORA = ("--enable-lora", "--max-lora-rank", "16")
PROMPTS = [[65, 66, 67, 68], [5, 200, 100], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def on(url: str, model: Path, **changes: Any) -> None:
    """Writes the recipe of a run on a server."""
    rollout = {"rollout__engine": "vllm", "rollout__servers": [url], "rollout__temperature": 0.8}
    write_policy(Path(), model={"path": str(model), "dtype": "float32"}, **rollout, **changes)


def alike() -> None:
    """Sampler and trainer agree at every step of the run, and something is learned from."""
    rows = steps("run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch/max"] < 1e-4  # 3e-6 was measured
        assert row["mismatch/corrected"] == 0
        assert row["compile/count"] == 0
    assert any(row["train/loss"] != 0 for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_grpo_through_vllm_with_an_adapter_and_with_all_weights(family: str, tmp_path: Path):
    model = family_folder(tmp_path / "model", family, tie_word_embeddings=False)
    with real(model, tmp_path / "log", *LORA) as url:
        on(url, model, adapter={"rank": 4, "alpha": 16})
        train("r.yaml")
        alike()
        on(url, model)
        train("r.yaml", "--fresh")
        alike()
        # The base is no longer that of an adapter's run.
        on(url, model, adapter={"rank": 4, "alpha": 16})
        assert main(["run", "r.yaml", "--fresh"]) == 2


def test_a_tied_head_that_a_cpu_does_not_renew_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = family_folder(tmp_path / "model", "gemma3_text", tie_word_embeddings=True)
    with real(model, tmp_path / "log", *LORA) as url:
        on(url, model, adapter={"rank": 4, "alpha": 16})
        train("r.yaml")
        alike()
        on(url, model, optimizer__learning_rate=1e-2)
        code = main(["run", "r.yaml", "--fresh"])
    told = capsys.readouterr().err
    # A vLLM that renews it needs no such message.
    assert code == 0 or "tied to the embeddings" in told


def test_steps_are_sampled_ahead(tmp_path: Path):
    """While the present step is learned from; each call under the weights that it was promised."""
    model = family_folder(tmp_path / "model", "llama", tie_word_embeddings=False)
    with real(model, tmp_path / "log", *LORA) as url:
        for adapter in ({"rank": 4, "alpha": 16}, None):
            on(url, model, adapter=adapter, steps=5, rollout__max_staleness=1)
            train("r.yaml", "--fresh")
            rows = [row for row in steps("run") if "rollout/staleness/max" in row]
            assert [row["step"] for row in rows] == [2, 3, 4, 5]
            assert {row["rollout/staleness/max"] for row in rows} <= {0, 1}
            # Tokens of earlier weights are left out of it.
            assert all(row["mismatch/max"] < 1e-4 for row in rows)


def test_truncated_sampling_is_replayed(tmp_path: Path):
    model = family_folder(tmp_path / "model", "llama")
    with real(model, tmp_path / "log") as url:
        on(url, model, rollout__top_k=10, rollout__top_p=0.5)
        train("r.yaml")
    alike()
    assert max(row["policy/entropy"] for row in steps("run")) < math.log(10)


@pytest.mark.parametrize("server", [real, ours], ids=["vllm", "tunix serve"])
def test_a_teacher_on_a_server_tells_what_it_tells_here(server: Any, tmp_path: Path):
    model, teacher = (family_folder(tmp_path / name, "llama") for name in ("model", "teacher"))
    whole = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    randomise(whole, 1)
    whole.save_pretrained(teacher)
    changes = {"model": {"path": str(model), "dtype": "float32"}, "algorithm__teacher_kl": 0.5}
    write_policy(Path(), **changes, teacher={"path": str(teacher), "dtype": "float32"})
    train("r.yaml", "output=here")
    with server(teacher, tmp_path / "log") as url:
        write_policy(Path(), **changes, teacher={"path": f"{url}/v1"})
        train("r.yaml", "output=there")
    for here, there in zip(steps("here"), steps("there"), strict=True):
        assert there["kl/teacher"] == pytest.approx(here["kl/teacher"], abs=1e-4)
        assert abs(here["kl/teacher"]) > 0.01


def test_stop_strings(tmp_path: Path):
    model = family_folder(tmp_path / "model", "llama")
    with real(model, tmp_path / "log") as url:
        on(url, model, rollout__stop=["a", "e", "\n", "7"])
        train("r.yaml")
    alike()
    assert any(row["rollout/truncated"] < 1 for row in steps("run"))


# --- Exported folders -----------------------------------------------------------------------------------------------


def asked(url: str, model: str, prompt: Sequence[int], number: int = 12, *, ignore_eos: bool = True) -> dict[str, Any]:
    """vLLM's most likely continuation of a prompt."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": number, "temperature": 0, "ignore_eos": ignore_eos}
    content = json.dumps({**body, "return_token_ids": True, "logprobs": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]


def continued(url: str, model: str) -> list[list[int]]:
    """The tokens of vLLM's most likely continuations."""
    return [asked(url, model, prompt)["token_ids"] for prompt in PROMPTS]


def sft(model: Path, **changes: Any) -> None:
    """Trains a few steps on rows."""
    write_recipe(Path("s.yaml"), {"model": {"path": str(model), "dtype": "float32"}, **changes})
    train("s.yaml", "--fresh")


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_folders_and_adapters_give_transformers_tokens(family: str, tmp_path: Path):
    model = family_folder(tmp_path / "model", family)
    sft(model, adapter={"rank": 4, "alpha": 16})
    assert main(["export", "run", "merged"]) == 0
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    expected = greedy(tmp_path / "merged", PROMPTS, 12)
    assert expected != greedy(model, PROMPTS, 12)
    with real(tmp_path / "merged", tmp_path / "log") as url:
        assert continued(url, str(tmp_path / "merged")) == expected
    with real(model, tmp_path / "log", *LORA, "--lora-modules", f"mine={tmp_path / 'adapter'}") as url:
        assert continued(url, "mine") == expected


def test_vllm_stops_where_the_turns_end(tmp_path: Path):
    """A final norm of zeros makes all logits 0, so that it says <pad>, the first id: a stop of the template alone."""
    model = family_folder(tmp_path / "model", "llama", tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    norm = torch.zeros_like(tensors["model.norm.weight"])
    save_file({**tensors, "model.norm.weight": norm}, model / "model.safetensors", {"format": "pt"})
    Path("turns.jinja").write_text(TURNS.replace("END", " <pad>"))
    write_rows(Path("train.jsonl"), CHAT)
    sft(model, **{"data.chat_template": "turns.jinja", "adapter": {"rank": 4}, "steps": 1})
    assert main(["export", "run", "merged"]) == 0
    for folder, number, reason in ((model, 8, "length"), (Path("merged").resolve(), 1, "stop")):
        with real(folder, tmp_path / "log") as url:
            choice = asked(url, str(folder), PROMPTS[0], 8, ignore_eos=False)
        assert (choice["token_ids"], choice["finish_reason"]) == ([0] * number, reason)


@pytest.mark.parametrize("family", MIXTURES)
def test_exported_mixtures_give_transformers_tokens(family: str, tmp_path: Path):
    model = family_folder(tmp_path / "model", family, tie_word_embeddings=False)
    sft(model)
    assert main(["export", "run", "out"]) == 0
    expected = greedy(tmp_path / "out", PROMPTS, 12)
    assert expected != greedy(model, PROMPTS, 12)
    with real(tmp_path / "out", tmp_path / "log") as url:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            choice = asked(url, str(tmp_path / "out"), prompt)
            assert choice["token_ids"] == tokens
            found = choice["logprobs"]["token_logprobs"]
            np.testing.assert_allclose(found, likelihoods(tmp_path / "out", prompt, tokens), atol=1e-4)


MISSING = "cpu_gemm_wna16"
"""vLLM's product with weights of few bits on a CPU, which the build for it leaves out for some processors."""


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_folders_give_transformers_tokens(family: str, tmp_path: Path):
    model = family_folder(tmp_path / "model", family)
    sft(model, quantization={"rules": [{"module": ".*", "weights": "int4", "tile": 32}]})
    assert main(["export", "run", "packed", "--packed"]) == 0
    expected = greedy(tmp_path / "packed", PROMPTS, 12)
    with real(tmp_path / "packed", tmp_path / "log") as url:
        try:
            found = continued(url, str(tmp_path / "packed"))
        except urllib.error.HTTPError:
            if MISSING not in (tmp_path / "log").read_text(errors="replace"):
                raise
            pytest.skip(f"this vLLM has loaded the folder, and lacks {MISSING} to compute with it")
    assert found == expected


# --- Mixtures -------------------------------------------------------------------------------------------------------


async def nothing(*_: Any) -> bool:
    """In place of a hand-over: the server has these weights."""
    return True


def test_the_experts_that_vllm_chose_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Where it does not renew the experts of a mixture, which is found out, its first weights are those of the run."""
    model = family_folder(tmp_path / "model", "qwen3_moe", tie_word_embeddings=False)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with real(model, tmp_path / "log", experts=True) as url:
        for prompt in PROMPTS:
            choice = asked(url, str(model), prompt)
            whole = np.array([*prompt, *choice["token_ids"]], np.int32)
            logits = reference(torch.from_numpy(whole)[None].long(), output_router_logits=True).router_logits
            expected = np.stack([one.topk(2).indices.numpy() for one in logits], axis=1)
            np.testing.assert_array_equal(read_experts(choice["routed_experts"]), expected[:-1])
        with monkeypatch.context() as first:
            first.setattr(Handover, "load", nothing)
            first.setattr(Handover, "holds", nothing)
            on(url, model, optimizer__learning_rate=1e-12)
            train("r.yaml")
            alike()
            # With others in their place the trainer computes something else, so these are what it uses.
            first.setattr(sampler, "of_sequence", lambda *given: (of_sequence(*given) + 1) % 8)
            on(url, model, optimizer__learning_rate=1e-12, rollout__mismatch_tolerance=9.0)
            train("r.yaml", "--fresh")
            assert all(row["mismatch/max"] > 0.1 for row in steps("run"))
        on(url, model)
        code = main(["run", "r.yaml", "--fresh"])
    # A vLLM that renews them needs no such message.
    assert code == 0 or "does not renew the experts of a mixture" in capsys.readouterr().err
