"""Commands whose answers a folder's own head drafts: the same answers with and without, and what of it was accepted."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.hf.test_model_folder import rewrite
from tests.mtp import MIXTURE, Reference, folder_with_head
from tests.tiny_runs import lines, write_rows
from tunix.cli import main
from tunix.inference.batcher import Ticket
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.gate import Refusal
from tunix.serving.service import Service
from tunix.types import Request, Sampling

pytestmark = pytest.mark.models
VOCAB = 8
"""So few ids that a random head is right now and then."""
IDS = [[1, 3, 5], [2, 4, 6, 1, 3, 5, 7, 2, 4], [7]]
ROWS = [{"input_ids": ids} for ids in IDS]
DRAFTS = ("--speculate", "2", "--mtp")
EVEN = "def even(completion, completion_ids):\n    return sum(x % 2 for x in completion_ids) / len(completion_ids)\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A random folder without a tokenizer, and torch's reference."""
    folder = tmp_path_factory.mktemp("models") / "base"
    return folder, folder_with_head(folder, vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(EVEN)


def generated(folder: Path, out: str, *words: str) -> list[dict[str, Any]]:
    rows = write_rows(Path("rows.jsonl"), ROWS)
    assert main(["generate", str(folder), "--input", str(rows), "--out", out, "--max-tokens", "24", *words]) == 0
    return lines(Path(out))


def counts(said: str) -> tuple[int, int]:
    """How many draft tokens were accepted, and of how many."""
    found = re.search(r", (\d+) of (\d+) draft tokens accepted", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def greedy(reference: Reference, ids: list[int], number: int) -> list[int]:
    """transformers' answer, without a cache; 2 ends it."""
    tokens = list(ids)
    while len(tokens) < len(ids) + number and tokens[len(ids) :][-1:] != [2]:
        tokens.append(int((reference.states(np.array(tokens))[-1] @ reference.table.T).argmax()))
    return tokens[len(ids) :]


def test_generated_answers_are_those_of_transformers_and_drafts_are_counted(base, capsys):
    folder, reference = base
    greedily = generated(folder, "greedy.jsonl", "--temperature", "0", *DRAFTS)
    assert [row["tokens"] for row in greedily] == [greedy(reference, ids, 24) for ids in IDS]
    accepted, drafted = counts(capsys.readouterr().out)
    assert 0 < accepted < drafted
    assert drafted == 2 * (sum(len(row["tokens"]) for row in greedily) - accepted)


def test_draws_are_the_same_with_and_without(base, capsys):
    folder, _ = base
    plain = generated(folder, "plain.jsonl", "--n", "3", "--seed", "5")
    assert "draft" not in capsys.readouterr().out
    for number, words in enumerate((DRAFTS, ("--speculate", "2"))):  # the head's, and those of what came before
        drafted = generated(folder, f"{number}.jsonl", "--n", "3", "--seed", "5", *words)
        counts(capsys.readouterr().out)
        for row, other in zip(plain, drafted, strict=True):
            assert row["tokens"] == other["tokens"]
            np.testing.assert_allclose(row["logprobs"], other["logprobs"], atol=1e-5)


def test_a_model_is_measured_alike(base, capsys):
    folder, _ = base
    write_rows(Path("held.jsonl"), [{"prompt_ids": ids} for ids in IDS])
    call = ["eval", str(folder), "held.jsonl", "--task", "reward", "--reward", "rewards.py:even", "--max-tokens", "24"]
    call += ["--temperature", "1", "--n", "2", "--out"]
    assert main([*call, "plain.json"]) == 0
    assert "draft" not in capsys.readouterr().out
    assert main([*call, "drafted.json", *DRAFTS]) == 0
    counts(capsys.readouterr().out)
    plain, drafted = (json.loads(Path(name).read_text()) for name in ("plain.json", "drafted.json"))
    assert plain == drafted


def test_a_server_answers_alike_counts_and_loads_further_weights(base, tmp_path):
    """Weights with another head answer the same; weights without one are refused, and the others stay."""
    folder, reference = base
    options = InferenceOptions(str(folder), slots=2, length=64, speculate=2, mtp=True)
    service = Service(InferenceModel(options), devices=jax.devices()[:1], updates=tmp_path)

    def answers() -> list[list[int]]:
        sampling = Sampling(max_tokens=24, temperature=0.0, stop_ids=(2,))
        tickets = [Ticket(Request(np.array(ids, np.int32), sampling, 0, i)) for i, ids in enumerate(IDS)]
        service.batches.submit(tickets)
        return [ticket.future.result(120).tokens.tolist() for ticket in tickets]

    def metric(name: str) -> int:
        found = re.search(rf"^tunix_{name}_tokens_total (\d+)$", service.metrics(), re.MULTILINE)
        assert found is not None
        return int(found[1])

    expected = [greedy(reference, ids, 24) for ids in IDS]
    sampled = sum(map(len, expected))
    assert answers() == expected
    first = metric("accepted")
    assert 0 < first < metric("drafted") == 2 * (sampled - first)
    folder_with_head(tmp_path / "other", vocab_size=VOCAB)
    rewrite(tmp_path / "other", lambda kept: {n: -x if n.startswith("mtp.fc") else x for n, x in kept.items()})
    service.load(tmp_path / "other")
    assert answers() == expected
    assert metric("accepted") - first != first
    rewrite(tmp_path / "other", lambda kept: {n: x for n, x in kept.items() if not n.startswith("mtp.")})
    with pytest.raises(Refusal, match="the files beside it hold no mtp"):
        service.load(tmp_path / "other")
    assert answers() == expected
    service.batches.close()


@pytest.mark.parametrize("command", ["generate", "eval", "chat", "serve"])
def test_a_folder_without_a_head_is_refused_in_a_line_before_weights_are_read(command, tmp_path, capsys, monkeypatch):
    folder_with_head(tmp_path / "base")
    rewrite(tmp_path / "base", lambda kept: {name: x for name, x in kept.items() if not name.startswith("mtp.")})
    monkeypatch.setattr("tunix.hf.safetensors_io.Stored.read", lambda *_: pytest.fail("weights are read"))
    write_rows(Path("held.jsonl"), [{"prompt_ids": ids} for ids in IDS])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    more = {
        "generate": ["hi"],
        "eval": ["held.jsonl", "--reward", "rewards.py:even"],
        "chat": [],
        "serve": ["--port", str(port)],
    }
    call = [command, "base", *more[command]]
    capsys.readouterr()
    assert main([*call, *DRAFTS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: model.mtp (--mtp): base/config.json: the files beside it hold no mtp.* tensor: leave"
    )
    assert main([*call, "--mtp"]) == 2
    assert "--mtp loads a head that makes draft tokens, and --speculate asks for none" in capsys.readouterr().err
    assert main([*call, "--speculate", "8"]) == 2
    assert "--speculate: invalid choice: 8" in capsys.readouterr().err


def test_the_small_random_model_of_serve_has_none(capsys):
    assert main(["serve", "--tiny", *DRAFTS]) == 2
    assert "--mtp: the small random model of --tiny has no head" in capsys.readouterr().err


@pytest.mark.slow  # each part is tested by itself: adapters in tests/lora, drafts and mixtures in tests/rollout/engine
@pytest.mark.parametrize("case", ["qwen3_5-three-to-one", MIXTURE])
def test_adapters_are_drafted_for_by_their_bases_head(case, tmp_path, capsys):
    """One that is merged, and two that share batches: the head stays the base's, and answers are those without."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder_with_head(tmp_path / "base", case, vocab_size=VOCAB)
    for name, rank in (("one", 4), ("two", 2)):
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained("base"), config).save_pretrained(name)
    for number, words in enumerate((["--adapter", "one"], ["--adapter", "one", "--adapter", "two"])):
        plain = generated(Path("base"), f"plain{number}.jsonl", "--seed", "3", *words)
        drafted = generated(Path("base"), f"drafted{number}.jsonl", "--seed", "3", *words, *DRAFTS)
        counts(capsys.readouterr().out)
        assert [row["tokens"] for row in plain] == [row["tokens"] for row in drafted]
