"""The unmodified tinker SDK and tinker-cookbook against `tunix serve --train`: what trains, resumes and learns."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.test_pages import HUB_ID, blocks
from tests.tiny_runs import model_folder
from tunix.data.tokenizer import bytes_tokenizer

pytestmark = [pytest.mark.worlds, pytest.mark.filterwarnings("ignore")]
LENGTH = 256
PROMPT = [70, 71, 72, 73]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of `tunix serve`, and the folder of its model: random, with the turns of ChatML."""
    folder = tmp_path_factory.mktemp("served")
    # Matrices of 32 and more: recipes of the cookbook ask for a rank of 32.
    model = model_folder(folder / "some" / "model", tokenizer=False, head_dim=16, max_position_embeddings=LENGTH)
    bytes_tokenizer("chatml").save(model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tunix.cli", "serve", str(model), "--port", str(port), "--slots", "32"]
    log = (folder / "log").open("w")
    process = subprocess.Popen([*command, "--train", str(folder / "adapters")], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                httpx.get(f"{url}/api/v1/healthz", timeout=600)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url, model
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), (folder / "log").read_text()


@pytest.fixture
def service(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The SDK's client, with a session of its own."""
    import tinker

    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient(base_url=server[0])
    yield client
    client.close("success").result()


def datum(length: int, seed: int = 0, **inputs: Any) -> Any:
    """Random tokens and those that follow; a number stands for itself at each token."""
    from tinker import types

    tokens = np.random.default_rng(seed).integers(3, 200, length + 1).tolist()
    named = {name: np.full(length, x, np.float32) if np.isscalar(x) else x for name, x in inputs.items()}
    tensors = {name: types.TensorData.from_numpy(np.asarray(x)) for name, x in named.items()}
    tensors["target_tokens"] = types.TensorData.from_numpy(np.array(tokens[1:]))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


DATA = (5, 20, 33)


def weighted(weight: float = 1.0) -> list[Any]:
    return [datum(length, length, weights=weight) for length in DATA]


def train(
    trainer: Any, data: list[Any], steps: int = 1, loss: str = "cross_entropy", rate: float = 1e-2
) -> list[float]:
    """The losses before each update."""
    from tinker import types

    losses = []
    for _ in range(steps):
        future = trainer.forward_backward(data, loss)
        trainer.optim_step(types.AdamParams(learning_rate=rate)).result()
        losses.append(future.result().metrics["loss:sum"])
    return losses


def measured(trainer: Any) -> float:
    return trainer.forward(weighted(), "cross_entropy").result().metrics["loss:sum"]


def test_tenants_do_not_see_each_other(service: Any, server: tuple[str, Path]):
    """Two ranks, updates in turn, the second with attention alone: each trains as it does alone."""
    model = str(server[1])

    def made(rank: int, **switches: bool) -> Any:
        return service.create_lora_training_client(model, rank=rank, seed=rank, **switches).result()

    alone = [train(made(4), weighted(), 4), train(made(32, train_mlp=False), weighted(0.5), 4)]
    both = [made(4), made(32, train_mlp=False)]
    assert [client.get_info().lora_rank for client in both] == [4, 32]
    together = [[*train(both[0], weighted()), *train(both[1], weighted(0.5))] for _ in range(4)]
    np.testing.assert_array_equal(np.transpose(together), alone)
    assert alone[0][-1] < 0.8 * alone[0][0]


def test_gradients_are_summed_and_forward_never_trains(service: Any, server: tuple[str, Path]):
    """Three calls and an update do what one call with all data does; so does a custom loss of the same gradient."""
    from tinker import types

    model, results = str(server[1]), []

    def custom(data: list[Any], logprobs: list[Any]) -> Any:
        return -sum(x.sum() for x in logprobs), {"longest": float(max(map(len, logprobs)))}

    for kind in ("whole", "parts", "custom"):
        trainer = service.create_lora_training_client(model, rank=8, seed=1).result()
        train(trainer, weighted())  # so that A has a gradient too
        if kind == "parts":
            for part in weighted():
                trainer.forward([datum(50, weights=3.0)], "cross_entropy").result()
                trainer.forward_backward([part], "cross_entropy").result()
        elif kind == "custom":
            metrics = trainer.forward_backward_custom(weighted(), custom).result().metrics
            assert metrics["loss:sum"] == pytest.approx(measured(trainer), rel=1e-5)
        else:
            trainer.forward_backward(weighted(), "cross_entropy").result()
        norm = trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"]
        results.append((norm, measured(trainer)))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)


def test_many_targets_at_a_position(service: Any, server: tuple[str, Path]):
    """A sum over targets is the sum of the sums over each of them."""
    from tinker import types

    trainer = service.create_lora_training_client(str(server[1]), rank=8, seed=2).result()
    targets, weights = np.array([[3, 4], [5, 6], [7, 8]]), np.array([[0, 1], [0.5, 0], [0, -2]], np.float32)

    def of(targets: np.ndarray, weights: np.ndarray) -> Any:
        tensors = {"target_tokens": targets, "weights": weights}
        named = {name: types.TensorData.from_numpy(x) for name, x in tensors.items()}
        return types.Datum(model_input=types.ModelInput.from_ints([9, 8, 7]), loss_fn_inputs=named)

    both = trainer.forward([of(targets, weights)], "cross_entropy").result()
    each = trainer.forward([of(targets[:, k], weights[:, k]) for k in range(2)], "cross_entropy").result()
    assert both.metrics["loss:sum"] == pytest.approx(each.metrics["loss:sum"], abs=1e-5)
    columns = [x["logprobs"].to_numpy() for x in each.loss_fn_outputs]
    np.testing.assert_allclose(both.loss_fn_outputs[0]["logprobs"].to_numpy(), np.stack(columns, 1), atol=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_rewarded_tokens_become_likelier(service: Any, server: tuple[str, Path], loss: str):
    trainer = service.create_lora_training_client(str(server[1]), rank=8, seed=2).result()
    plain = trainer.forward(weighted(), "cross_entropy").result().loss_fn_outputs
    data = [datum(n, n, advantages=1.0, logprobs=x["logprobs"].to_numpy()) for n, x in zip(DATA, plain, strict=True)]
    before = measured(trainer)
    (first,) = train(trainer, data, loss=loss)
    # On policy, the ratio is 1: -A of each token, or -A log p.
    expected = before if loss in ("cispo", "dro") else -sum(DATA)
    assert first == pytest.approx(expected, rel=1e-4)
    train(trainer, data, 3, loss)
    assert measured(trainer) < before - 1


def test_samples_are_the_models(service: Any, server: tuple[str, Path]):
    """Log-probs of samples are those of the forward pass; greedy and seeded samples repeat; snapshots stay."""
    from tinker import types

    trainer = service.create_lora_training_client(str(server[1]), rank=8, seed=2).result()
    train(trainer, weighted(), 3)
    sampler, prompt = trainer.save_weights_and_get_sampling_client().result(), types.ModelInput.from_ints(PROMPT)

    def sample(n: int = 3, sampler: Any = sampler, **settings: Any) -> list[Any]:
        params = types.SamplingParams(**{"max_tokens": 12, "stop": [], **settings})
        return sampler.sample(prompt, n, params).result().sequences

    for settings in ({"seed": 5}, {"seed": 5, "temperature": 0.5, "top_k": 20}, {"temperature": 0.0}):
        first, second = sample(**settings), sample(**settings)
        assert [x.tokens for x in first] == [x.tokens for x in second]
        assert len({tuple(x.tokens) for x in first}) == (1 if settings.get("temperature") == 0 else 3)
        for sequence in first:
            assert len(sequence.tokens) == 12
            whole = [*PROMPT, *sequence.tokens]
            targets = types.TensorData.from_numpy(np.array(whole[1:]))
            weights = types.TensorData.from_numpy(np.zeros(len(whole) - 1, np.float32))
            inputs = {"target_tokens": targets, "weights": weights}
            known = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
            scored = trainer.forward([known], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
            np.testing.assert_allclose(sequence.logprobs, scored[len(PROMPT) - 1 :], atol=1e-5)
    prompts = sampler.compute_logprobs(prompt).result()
    assert prompts[0] is None
    np.testing.assert_allclose(prompts[1:], scored[: len(PROMPT) - 1], atol=1e-5)
    (stopped,) = sample(1, temperature=0.0, stop=[first[0].tokens[2]])
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == first[0].tokens[: len(stopped.tokens)]
    assert stopped.tokens[-1] == first[0].tokens[2]
    # Training goes on, and the snapshot stays; the base is another model.
    train(trainer, weighted(), 1)
    assert sampler.compute_logprobs(prompt).result() == prompts
    base = service.create_sampling_client(base_model=str(server[1])).result()
    assert base.compute_logprobs(prompt).result() != prompts


def test_training_goes_on_exactly(service: Any, server: tuple[str, Path]):
    """With the optimizer's state a new client trains as the first one; without, it begins with fresh moments."""
    trainer = service.create_lora_training_client(str(server[1]), rank=8, seed=2, user_metadata={"a": "b"}).result()
    train(trainer, weighted(), 3)
    path, named = (trainer.save_state("x").result().path, trainer.save_weights_for_sampler("x").result().path)
    assert path.startswith("tinker://")
    going = train(trainer, weighted(), 3)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(again, weighted(), 3) == going
    fresh = train(service.create_training_client_from_state(path).result(), weighted(), 3)
    assert fresh[0] == going[0]
    assert fresh[1] != going[1]
    # Saved weights are the snapshot's, and both are PEFT folders.
    from tinker import RestClient, types

    prompt = types.ModelInput.from_ints(PROMPT)
    first, second = (
        service.create_sampling_client(model_path=x).result().compute_logprobs(prompt).result() for x in (path, named)
    )
    assert first == second
    run = RestClient(base_url=server[0]).get_training_run_by_tinker_path(path).result()
    assert (run.user_metadata, run.lora_rank) == ({"a": "b"}, 8)
    _, _, name, kind, checkpoint = path.split("/")
    folder = server[1].parents[1] / "adapters" / name / kind / checkpoint
    assert {x.name for x in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    # They are listed, described and deleted.
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(name).result().checkpoints
    assert {x.tinker_path: x.checkpoint_type for x in listed} == {path: "training", named: "sampler"}
    assert {x.tinker_path for x in rest.list_user_checkpoints(limit=100).result().checkpoints} >= {path, named}
    assert name in [x.training_run_id for x in rest.list_training_runs().result().training_runs]
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.base_model, about.lora_rank, about.train_mlp, about.train_unembed) == (str(server[1]), 8, True, False)
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert [x.tinker_path for x in rest.list_checkpoints(name).result().checkpoints] == [path]


def test_what_is_wrong_is_said(service: Any, server: tuple[str, Path]):
    import tinker
    from tinker import types

    model = str(server[1])
    trainer = service.create_lora_training_client(model, rank=8).result()
    short = datum(4, weights=1.0)
    short.loss_fn_inputs["weights"] = types.TensorData.from_numpy(np.ones(3, np.float32))
    sampler = service.create_sampling_client(base_model=model).result()
    for wrong, says in (
        (lambda: service.create_lora_training_client("other", rank=8).result(), "other is not served here"),
        (lambda: service.create_lora_training_client(model, rank=64).result(), "this server trains 1 to 32"),
        (lambda: trainer.forward_backward(weighted(), "gspo").result(), "'gspo' is not computed here"),
        (lambda: trainer.forward_backward([short], "cross_entropy").result(), r"weights has the shape \[3\]"),
        (lambda: trainer.forward([datum(LENGTH + 1, weights=1.0)], "cross_entropy").result(), "257 tokens; 1 to 256"),
        (lambda: trainer.save_state("a b").result(), "is no path of a checkpoint"),
        (lambda: service.create_sampling_client(model_path="tinker://a/weights/b").result(), "there is no checkpoint"),
        (
            lambda: sampler.sample(types.ModelInput.from_ints([3] * LENGTH), 1, types.SamplingParams()).result(),
            "leaves no room",
        ),
    ):
        with pytest.raises(tinker.TinkerError, match=says):
            wrong()
    assert train(trainer, weighted(), 2)[1] < measured(service.create_lora_training_client(model, rank=8).result())


# The recipes of the cookbook, as a user runs them.


def recipe(name: str, server: tuple[str, Path], folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The rows of metrics of a recipe that has run to its end."""
    url, model = server
    quiet = {f"{name}_OFFLINE": "1" for name in ("HF_HUB", "HF_DATASETS", "TRANSFORMERS")}
    environment = {
        **os.environ,
        **quiet,
        "TINKER_API_KEY": "tml-local",
        "TINKER_BASE_URL": url,
        "TINKER_TELEMETRY": "0",
    }
    words = [f"model_name={model}", f"log_path={folder / 'log'}", "behavior_if_log_dir_exists=delete", *settings]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train", *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def test_supervised_learning(server: tuple[str, Path], tmp_path: Path):
    def row(letter: str) -> str:
        said = [("user", f"say {letter * 3}"), ("assistant", letter.upper() * 6)]
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in said]})

    (tmp_path / "data.jsonl").write_text("".join(row(letter) + "\n" for letter in "abcdefgh" for _ in range(16)))
    settings = ("renderer_name=role_colon", "learning_rate=3e-3", "batch_size=32", "num_epochs=8", "eval_every=0")
    rows = recipe("chat_sl", server, tmp_path, f"dataset={tmp_path / 'data.jsonl'}", f"base_url={server[0]}", *settings)
    losses = [x["train_mean_nll"] for x in rows if "train_mean_nll" in x]
    assert len(losses) == 32
    assert losses[-1] < 0.5 * losses[0]  # measured: 6.29 -> 2.22


def test_reinforcement_learning(server: tuple[str, Path], tmp_path: Path):
    """The shorter of two answers wins: a random model learns to stop. Its samples are from what trains, exactly."""
    settings = ("renderer_name=qwen3_instruct", "batch_size=4", "group_size=8", "max_tokens=48", "learning_rate=3e-3")
    rows = recipe("preference.shorter", server, tmp_path, "max_steps=32", "eval_every=0", *settings)
    lengths = [x["env/all/ac_tokens_per_turn"] for x in rows if "env/all/ac_tokens_per_turn" in x]
    assert len(lengths) == 32
    assert np.mean(lengths[-4:]) < 0.5 * np.mean(lengths[:4])  # measured: 42.8 -> 2.1
    assert max(abs(x.get("optim/kl_sample_train_v1", 0.0)) for x in rows) < 1e-5


def test_a_loop_with_checkpoints(server: tuple[str, Path], tmp_path: Path):
    settings = ("env=arithmetic", "renderer_name=role_colon", "loss_fn=importance_sampling", "group_size=4")
    sizes = ("groups_per_batch=8", "max_tokens=4", "max_steps=3", "eval_every=0", "save_every=2")
    assert len(recipe("math_rl", server, tmp_path, f"base_url={server[0]}", *settings, *sizes)) >= 3
    saved = (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()
    assert "state_path" in json.loads(saved[-1])


def test_the_guide(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", server[0])
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    namespace: dict[str, Any] = {}
    for block in blocks("docs/guide/tinker.md", "python"):
        exec(compile(block.text.replace(HUB_ID, str(server[1])), "tinker.md", "exec"), namespace)
    assert namespace["losses"][-1] < 0.5 * namespace["losses"][0]
