"""A reward model that judges a policy: its own tokens or the text anew, what it cannot score, and runs against it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.marks import slow
from tests.run.test_reward_run import write_reward
from tests.tiny_models import one_device, randomise
from tests.tiny_rl import write_policy
from tests.tiny_runs import VOCAB, lines, metrics, model_folder, train, write_rows
from tunix.cli import main
from tunix.data.config import DataConfig
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Prompt
from tunix.rollout.rewards.base import Failure
from tunix.rollout.rewards.config import RewardConfig
from tunix.run.reward_model import TOGETHER, judge
from tunix.trainer.perf import Compilations
from tunix.types import Completion, Sampling

LLAMA3, GEMMA = bytes_tokenizer("llama3"), bytes_tokenizer("gemma")


def reward_folder(folder: Path, template="llama3", **fields) -> Path:
    """A random reward model of tiny_runs' sizes as transformers saves it, with a byte tokenizer beside it."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", **{**sizes, **heads, "num_labels": 1, "pad_token_id": 0, **fields})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    bytes_tokenizer(template).save(folder)
    return folder


def their_score(folder: Path, tokens: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, 0])


def drawn(tokens: list[int], finish="stop") -> Completion:
    made = np.asarray(tokens, np.int32)
    return Completion(
        made, np.zeros(len(made), np.float32), finish, np.ones(len(made), np.int32), Sampling(), ((0, len(made)),)
    )


def prompt(text: str, **row) -> Prompt:
    return Prompt(np.asarray(LLAMA3.encode(text, bos=True), np.int32), text, {"prompt": text, **row})


def judged(folder: Path, policy=LLAMA3, data: dict | None = None, **config):
    section = RewardConfig(model=str(folder), **config)
    found = judge(section, policy, DataConfig(train="x", **{"max_length": 32, **(data or {})}), "float32", one_device())
    assert found is not None
    return replace(found, begin=lambda *asked: lambda: [x.score for x in found.begin(*asked)()])


def test_the_policys_own_tokens_are_scored_as_they_were_drawn(tmp_path):
    """70 completions in two calls of one shape; ids that no text would give (a stop token in the middle) stay."""
    folder = reward_folder(tmp_path / "reward")
    found = judged(folder)
    assert (found.name, found.weight) == ("model", 1.0)
    rng = np.random.default_rng(0)
    completions = [drawn(rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()) for _ in range(TOGETHER + 6)]
    asked = [prompt("abc"[: 1 + i % 3]) for i in range(TOGETHER + 6)]
    scores = found.begin(asked, completions, [""] * len(asked))()
    for i in (0, 1, TOGETHER, TOGETHER + 5):
        expected = their_score(folder, [*asked[i].tokens.tolist(), *completions[i].tokens.tolist()])
        assert scores[i] == pytest.approx(expected, abs=1e-4)
        assert expected % 1  # a fraction stays one
    compilations = Compilations()
    assert found.begin(asked[:3], completions[:3], [""] * 3)() == pytest.approx(scores[:3], abs=1e-5)
    assert compilations.since_warmup == 0


def test_another_tokenizer_reads_the_text(tmp_path):
    """Gemma's specials, BOS and EOS by hand around the bytes; without EOS where the completion was cut off."""
    folder = reward_folder(tmp_path / "reward", "gemma")
    found = judged(folder)
    pair = [drawn(LLAMA3.encode("xyz"), finish) for finish in ("stop", "length")]
    scores = found.begin([prompt("ab")] * 2, pair, ["xyz"] * 2)()
    whole = [GEMMA.bos_id, *GEMMA.encode("ab"), *GEMMA.encode("xyz"), GEMMA.eos_id]
    assert scores[0] == pytest.approx(their_score(folder, whole), abs=1e-4)
    assert scores[1] == pytest.approx(their_score(folder, whole[:-1]), abs=1e-4)
    assert abs(scores[0] - scores[1]) > 1e-3


def test_another_template_renders_the_chat(tmp_path):
    """Messages, and strings that the recipe makes a chat of; scored up to the end of the turn, not what follows it."""
    folder = reward_folder(tmp_path / "reward", "gemma")
    found = judged(folder, data={"max_length": 32, "chat": True})
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "xyz"}]
    text, _ = GEMMA.marked_text(said, {})
    whole = GEMMA.encode(text)
    end = len(GEMMA.encode(text.rstrip("\n")))
    assert end < len(whole)
    expected = their_score(folder, whole[:end])
    chat = replace(prompt("ab"), row={"messages": said[:1]})
    for asked in (chat, prompt("ab"), replace(chat, row={"messages": [said[0], {**said[1], "content": "no"}]})):
        assert found.begin([asked], [drawn([5])], ["xyz"])() == [pytest.approx(expected, abs=1e-4)]


def test_what_is_too_long_fails_and_is_no_zero(tmp_path):
    found = judged(reward_folder(tmp_path / "reward"), data={"max_length": 6})
    scores = found.begin([prompt("abc")] * 2, [drawn([9, 1]), drawn([9, 9, 1])], ["", ""])()
    assert isinstance(scores[0], float)
    assert scores[1] == Failure("model reads 6 tokens (data.max_length), and these are 7")
    assert found.begin([prompt("abc")], [drawn([9] * 9)], [""])() == [
        Failure("model reads 6 tokens (data.max_length), and these are 13")
    ]


@pytest.mark.parametrize(
    "algorithm", slow([{"name": "grpo"}, {"name": "ppo"}, {"name": "dpo", "online": True}]), ids=str
)
def test_a_policy_learns_from_a_reward_model(algorithm, tmp_path):
    """The reward model is a run of ours that likes capitals; beside it a function, each under its name."""
    train(str(write_reward(tmp_path)))
    for file in ("train.jsonl", "held.jsonl"):
        write_rows(tmp_path / file, [{"prompt": f"{letters}>"} for letters in ("abc", "bcd", "cde", "def")])
    reward = {"model": "reward", "functions": ["rewards.py:letters"]}
    changes = {"algorithm": {**algorithm, "group_size": 4}, "reward": reward, "data__eval": "held.jsonl"}
    train(str(write_policy(tmp_path, steps=2, **changes)))
    rows = [row for row in metrics("run") if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/failed"] == 0
        assert row["compile/count"] == rows[0]["compile/count"]
        assert row["reward/mean"] == pytest.approx(row["reward/model"] + row["reward/letters"], abs=1e-5)
        assert abs(row["reward/model"]) > 1e-3
    assert all("eval/reward/model" in row for row in metrics("run") if "eval/reward" in row)
    samples = [row for row in lines(Path("run/samples.jsonl")) if "rewards" in row]
    assert len({row["rewards"]["model"] for row in samples}) > 8


def test_mistakes_are_told(tmp_path, capsys):
    reward_folder(tmp_path / "reward")
    model_folder(tmp_path / "causal")

    def said(*words: str) -> str:
        assert main([*words]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "reward is a reward model: it gives scores" in said("generate", "reward", "ab")
    recipe = str(write_policy(tmp_path, reward={"model": "causal"}))
    assert "reward.model: causal has no score.weight: it is no reward model" in said("run", recipe)
    language = said("run", recipe, "model={path: reward}", "reward={functions: [rewards.py:letters]}")
    assert "reward is a reward model: it has score.weight" in language
    assert "there is no such folder" in said("run", recipe, "reward.model=./nowhere")
    weighed = said("check", recipe, "reward={model: causal, model_weight: 2}")
    assert "model_weight is gone: it is 1; weigh the functions against it" in weighed
    twice = "reward={model: causal, functions: [{name: number, label: model}]}"
    assert "model stands there twice" in said("check", recipe, twice)
    silent = said("check", str(write_reward(tmp_path)), "eval.samples=2", "rollout.temperature=0.5")
    assert "eval.samples: 2 completions to show, but reward trains a model that gives scores" in silent
    assert "rollout: changes nothing" in silent
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "reward" / file).unlink()
    (tmp_path / "reward/chat_template.jinja").unlink(missing_ok=True)
    assert "reward has no tokenizer" in said("run", recipe, "reward.model=reward")
