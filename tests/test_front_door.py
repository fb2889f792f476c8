"""What `import tunix` offers: models that answer, a client in one line, the algorithms and their losses."""

import json
from contextlib import closing
from itertools import islice
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tunix
from tests.tiny_runs import model_folder
from tunix.data.chat import render_prompt
from tunix.errors import UserError
from tunix.inference.load import score
from tunix.protocols import Client

FLOAT32 = {"dtype": "float32"}
GREEDY = tunix.Sampling(max_tokens=6, temperature=0.0)
ROWS = [{"prompt": letter * 5, "answer": letter} for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("front") / "base")


@pytest.fixture(scope="module")
def model(folder: Path):
    return tunix.load(folder, length=64, slots=4)


@pytest.fixture(scope="module")
def client(folder: Path):
    rule = {"learning_rate": 1e-2}
    return tunix.client({"path": str(folder), **FLOAT32}, optimizer=rule, length=32, batch_size=8, reference=True)


def test_every_public_name_is_there():
    for name in tunix.__all__:
        assert getattr(tunix, name) is not None
    assert set(dir(tunix)) == set(tunix.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = tunix.lode  # pyright: ignore[reportAttributeAccessIssue]


def test_answers_stand_in_the_order_of_prompts(model):
    """Sampled together they are what each is by its place and the seed; one prompt need not be in a list."""
    found = model.generate(["abc", [5, 6, 7], {"prompt": "b"}], 2, sampling=tunix.Sampling(max_tokens=5), seed=3)
    assert len(found) == 6
    assert len({tuple(one.completion.tokens) for one in found[:2]}) == 2
    again = model.generate("abc", 2, sampling=tunix.Sampling(max_tokens=5), seed=3)
    assert [str(one) for one in again] == [one.text for one in found[:2]]
    assert found[0].text == model.tokenizer.decode(found[0].completion.tokens, skip_special=True)


def test_chat_answers_in_the_models_template(model):
    said = [{"role": "user", "content": "hello"}]
    asked = render_prompt(said, model.tokenizer).tokens
    expected = model.generate([asked.tolist()], sampling=GREEDY)[0].text
    assert model.chat("hello", sampling=GREEDY) == model.chat(said, sampling=GREEDY) == expected


@pytest.mark.slow
def test_scores_are_those_of_the_command(model, folder: Path, tmp_path: Path):
    rows = [{"text": "abcde"}, {"text": "edcbaedcba"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score(str(folder), str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for ours, theirs in zip(model.score([row["text"] for row in rows]), written, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs["logprobs"], atol=1e-5)
        assert ours.sum == pytest.approx(theirs["sum"], abs=1e-4)


def test_what_cannot_be_answered_is_named(model, tmp_path: Path):
    bare = tunix.load(model_folder(tmp_path / "bare", tokenizer=False))
    with pytest.raises(UserError, match="no chat template"):
        bare.chat("hello", sampling=GREEDY)
    with pytest.raises(UserError, match="give input_ids"):
        bare.generate("hello", sampling=GREEDY)
    with pytest.raises(UserError, match="prompt 2"):
        model.generate(["a", "b" * 80], sampling=GREEDY)
    with pytest.raises(UserError, match="nowhere"):
        tunix.load(tmp_path / "nowhere")


def test_a_client_samples_what_the_model_says(client, model):
    """Trainer, sampler and `tunix.load` are one model: greedy tokens, and their log-probs."""
    assert isinstance(client, Client)
    prompt = np.array(model.tokenizer.encode("abc", bos=True), np.int32)
    client.publish()
    ((drawn,),) = client.sample([prompt], 1, GREEDY, 0)
    alone = model.generate([prompt.tolist()], sampling=GREEDY)[0].completion
    stopped = alone.tokens[: len(drawn.tokens)]  # the client knows of no stop ids but those it is told
    np.testing.assert_array_equal(drawn.tokens[: len(stopped)], stopped)
    whole = tunix.Sequence(np.concatenate([prompt, drawn.tokens]), np.arange(len(prompt) + len(drawn.tokens)) > 3)
    (own,), (kept,) = client.logprobs([whole]), client.logprobs([whole], "reference")
    np.testing.assert_allclose(own[len(prompt) :], drawn.logprobs, atol=1e-4)
    np.testing.assert_allclose(own, kept, atol=1e-6)


def test_a_loop_of_three_lines_learns(client):
    """Plain likelihood of one repeated sequence; the reference stays where it was."""
    sequence = tunix.Sequence(np.arange(10, 26, dtype=np.int32), np.arange(16) > 0)
    batch, loss = tunix.pack([sequence] * 4, 4, 32), tunix.Loss(tunix.SFT(tunix.SFT.Config()).loss)
    before = client.logprobs([sequence], "reference")[0]
    losses = [float(client.step(batch, loss)["train/loss"]) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    np.testing.assert_array_equal(client.logprobs([sequence], "reference")[0], before)


def test_an_adapter_trains_alone(folder: Path):
    client = tunix.client({"path": str(folder), **FLOAT32}, adapter={"rank": 2}, length=32)
    assert all("lora" in name for name in client.learner.state.params)
    assert client.learner.reference is not None


def test_rollouts_and_an_algorithm_without_a_recipe(client, model):
    """Two updates of GRPO; what it is given is what `tunix.rollouts` says."""
    algorithm = tunix.GRPO(tunix.GRPO.Config(group_size=4), tunix.Sampling(max_tokens=6))

    def letters(completion: str, answer: str) -> float:
        return completion.count(answer) - len(completion) / 10

    stream = tunix.rollouts(algorithm, ROWS, model.tokenizer, [letters], batch_size=2, max_length=24)
    with closing(stream):
        for data in islice(stream, 2):
            update = algorithm.update(client, data)
            assert len(data.prompts) == 2
            assert float(update.metrics["mismatch/max"]) < 1e-3
            assert np.isfinite(update.metrics["reward/letters"])


def test_losses_are_pure_functions():
    """SFT's loss of one token of log-prob -2 is 2."""
    (term,) = tunix.losses.sft_loss(jnp.array([[0.0, -2.0]])).terms.values()
    assert term.values[0, 1] == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"learning_rte": 1.0}}, "optimizer.learning_rte"),
        ({"optimizer": {"schedule": "cosine"}}, "`steps`"),
        ({"adapter": {"rank": 0}}, "adapter.rank"),
        ({"mesh": {"fsdp": 0}}, "mesh"),
        ({"model": {"init": "random", "family": "lama"}}, "lama"),
        ({"model": {"init": "random", "family": "llama", "tokenizer": "bytes"}}, "model.tokenizer"),
    ],
)
def test_sections_that_mean_nothing_are_named(folder: Path, settings: dict, message: str):
    with pytest.raises(UserError, match=message):
        tunix.client(settings.pop("model", {"path": str(folder), **FLOAT32}), **settings)
