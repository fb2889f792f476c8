"""The Tinker door without its SDK: messages, promises and their order, losses, gradients, and bad requests.

`tests/worlds/test_tinker.py` has the unmodified SDK and cookbook.
"""

import asyncio
import gc
import json
import random
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.routing import Mount

import tunix
from tests.marks import slow
from tests.serving.test_fuzz import mutated
from tests.tiny_runs import VOCAB, model_folder
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.lora.config import AdapterConfig
from tunix.rollout.engine.engine import Engine
from tunix.serving.app import server_of
from tunix.serving.gate import Gate
from tunix.serving.service import Service
from tunix.serving.tinker.checkpoints import Checkpoints, Run
from tunix.serving.tinker.compute import LOSSES, Adapter, Chosen, Compute, Step, chosen, losses_of
from tunix.serving.tinker.futures import Promise, Promises, Refusal, Result, Turns
from tunix.serving.tinker.routes import Door
from tunix.serving.tinker.tenants import Tenants
from tunix.serving.tinker.wire import MESSAGES, Datum, config_of, data_of, forward_backward_output, parsed
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Sampling, Sequence, Term

RANK, LENGTH = 8, 64


def tensor(array: np.ndarray) -> Any:
    dtype = {np.dtype("float32"): 1, np.dtype("int64"): 2}[array.dtype]
    return MESSAGES["Tensor"](dense=array.tobytes(), dtype=dtype, shape=array.shape)


def message(data: list[Datum], loss: str = "cross_entropy", **fields: Any) -> Any:
    """A request as the SDK writes it."""
    request = MESSAGES["ForwardBackwardRequest"](loss_fn=loss, **fields)
    for datum in data:
        written = request.data.add()
        written.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            written.loss_fn_inputs[name].CopyFrom(tensor(values))
    return request


def datum(length: int, seed: int = 0, **inputs: Any) -> Datum:
    """Random tokens, whose targets are those that follow; inputs of a number have it at each token."""
    tokens = np.random.default_rng(seed).integers(3, 200, length + 1)
    named = {name: np.full(length, value, np.float32) for name, value in inputs.items()}
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64), **named})


# Messages.


def test_a_request_is_read_as_it_was_written():
    data = [datum(3, weights=1.5), datum(7, 1, weights=-2.0)]
    request = message(data, model_id="x:train:0", seq_id=7, forward_only=True)
    request.loss_fn_config["beta"] = 1.0
    request.loss_fn_config_v2["beta"].number = 0.5
    request.loss_fn_config_v2["mode"].text = "a"
    back = parsed(request.SerializeToString())
    assert (back.model_id, back.seq_id, back.loss_fn, back.forward_only) == ("x:train:0", 7, "cross_entropy", True)
    assert config_of(back) == {"beta": 0.5, "mode": "a"}
    for before, after in zip(data, data_of(back), strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        assert before.inputs.keys() == after.inputs.keys()
        assert all((before.inputs[name] == after.inputs[name]).all() for name in before.inputs)


def test_a_sparse_tensor_is_dense_here():
    """Rows of CSR: the first has columns 1 and 2, the second none, the third column 0."""
    request = message([datum(3)])
    csr = request.data[0].loss_fn_inputs["weights"]
    csr.dtype, csr.shape[:] = 1, [3, 4]
    csr.sparse_csr.values = np.array([1, 2, 3], "<f4").tobytes()
    csr.sparse_csr.crow_indices = np.array([0, 2, 2, 3], "<i8").tobytes()
    csr.sparse_csr.col_indices = np.array([1, 2, 0], "<i8").tobytes()
    (back,) = data_of(request)
    np.testing.assert_array_equal(back.inputs["weights"], [[0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.data[0].model_input.add().image.SetInParent(), "datum 0: model_input has image"),
        (lambda x: x.data[0].loss_fn_inputs["a"].shape.append(2), "datum 0: a has the type 0"),
        (lambda x: x.data[0].loss_fn_inputs["weights"].shape.append(5), r"weights does not fit its shape \[3, 5\]"),
    ],
)
def test_data_that_are_not_understood_are_refused(change: Any, says: str):
    request = message([datum(3, weights=1.0)])
    change(request)
    with pytest.raises(UserError, match=says):
        data_of(request)


def test_a_body_that_is_no_message_is_refused():
    with pytest.raises(Refusal, match="no protobuf"):
        parsed(b"\xff\xff\xff")


def test_results_of_several_shapes_are_in_records_of_their_own():
    outputs = [{"logprobs": np.zeros(shape, np.float32)} for shape in ((2,), (3,), (2, 4), (1,))]
    back = MESSAGES["ForwardBackwardOutput"].FromString(forward_backward_output(outputs, {"loss:sum": 2.0}))
    assert [x.num_datums for x in back.loss_fn_outputs] == [2, 1, 1]
    assert [list(x.fields["logprobs"].trailing_shape) for x in back.loss_fn_outputs] == [[], [4], []]
    assert np.frombuffer(back.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 20]
    assert dict(back.metrics) == {"loss:sum": 2.0}


# Promises and order.


def test_a_request_that_is_sent_again_is_the_same_promise():
    promises = Promises()
    promise = promises.reserve("m:1", b"body")
    assert promise is not None
    assert promises.reserve("m:1", b"body") is None
    with pytest.raises(Refusal, match="another body"):
        promises.reserve("m:1", b"other")
    assert asyncio.run(promises.result("m:1", 0.01)) is None
    promise.settle({"a": 1})
    promise.settle(UserError("too late"))
    assert asyncio.run(promises.result("m:1", 1)) == {"a": 1}
    with pytest.raises(Refusal, match="there is no request m:2"):
        asyncio.run(promises.result("m:2", 1))


def test_all_who_wait_are_answered():
    """2,000 polls, half of which are told to come again before the result is there."""
    promises = Promises()
    promise = promises.reserve("m:1", b"body")
    assert promise is not None

    async def polled() -> tuple[list[Any], list[Any]]:
        late = [asyncio.create_task(promises.result("m:1", 60)) for _ in range(1000)]
        early = await asyncio.gather(*(promises.result("m:1", 0.01) for _ in range(1000)))
        threading.Thread(target=promise.settle, args=[{"a": 1}]).start()
        return early, await asyncio.gather(*late)

    assert asyncio.run(polled()) == ([None] * 1000, [{"a": 1}] * 1000)


def asked(name: str) -> tuple[Promise, Callable[[], Result]]:
    return Promise(name, b""), dict


def carried_out(turns: Turns) -> list[str]:
    """The names of what is ready, in the order in which it is taken."""
    return [promise.request_id for promise, _ in iter(turns.take, None)]


def test_a_model_has_its_order_and_waits_for_none():
    """Chunks 2, 3 and 1 arrive in this order; another model's number 1 never comes."""
    turns = Turns()
    for model in ("a", "b"):
        turns.open(model)
    for model, number in (("a", 2), ("b", 0), ("b", 2), ("a", 3), ("a", 1), ("a", 0)):
        turns.add(model, number, asked(f"{model}{number}"))
    assert carried_out(turns) == ["a0", "b0", "a1", "a2", "a3"]
    with pytest.raises(UserError, match="carried out before"):
        turns.add("a", 2, asked("a2"))
    turns.close("a")
    with pytest.raises(Refusal, match="there is no model a"):
        turns.check("a")
    turns.check("b")


def test_models_take_turns():
    turns = Turns()
    for model in ("a", "b"):
        turns.open(model)
    for model in ("a", "b"):
        for number in range(3):
            turns.add(model, number, asked(f"{model}{number}"))
    assert carried_out(turns) == ["a0", "b0", "a1", "b1", "a2", "b2"]


# Losses.


def test_losses_are_the_protocols():
    """By hand, with log p = log 0.5 and log q = log 0.25: r = 2. First A = -1, then A = 1.

    importance_sampling: -r A. ppo, clipped at 1.2: -min(-2, -1.2) = 2, and -min(2, 1.2). cispo, at most 4:
    -2 A log 0.5. dro, beta 0.1: -A log 0.5 + 0.05 (log 2)^2. cross_entropy, weight 3: -3 log 0.5.
    """
    shape, low = (1, 2), np.log(0.5)
    mask = np.ones(shape, np.int32)
    rows = Batch(mask, mask, mask, mask == 1, mask, np.ones(1), np.ones(1), {})
    logprobs, q = jnp.full(shape, low), jnp.full(shape, np.log(0.25))
    values = {"weights": jnp.full(shape, 3.0), "logprobs": q, "advantages": jnp.array([[-1.0, 1.0]])}
    expected = {
        "cross_entropy": [-3 * low, -3 * low],
        "importance_sampling": [2, -2],
        "ppo": [2, -1.2],
        "cispo": [2 * low, -2 * low],
        "dro": [low + 0.05 * np.log(2) ** 2, -low + 0.05 * np.log(2) ** 2],
    }
    for name in LOSSES:
        _, loss = chosen(name, {"beta": 0.1} if name == "dro" else {})
        losses = jax.jit(losses_of)(loss, logprobs, values, rows)  # as the programs call it
        np.testing.assert_allclose(losses[0], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("ppp", {}, "'ppp' is not computed here; .*Did you mean 'ppo'"),
        ("stable_reinforce", {}, "Say loss_fn=importance_sampling"),
        ("ppo", {"beta": 1.0}, "ppo has no 'beta'; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"a": 1.0}, "it has none"),
        ("dro", {"beta": "much"}, "beta is a number"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(name: str, config: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        chosen(name, config)


# Checkpoints.


@pytest.mark.parametrize(
    "path", ["tinker://a/weights/..", "tinker://../weights/a", "tinker://a/b/c", "tinker://a/weights/b/c", "/a"]
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str):
    with pytest.raises(UserError, match="is no path of a checkpoint"):
        Checkpoints(tmp_path).folder(path)


def test_a_listing_sees_whole_checkpoints_while_they_come_and_go(tmp_path: Path):
    checkpoints, path, ends = Checkpoints(tmp_path), "tinker://a:train:0/weights/x", threading.Event()
    checkpoints.begin("a:train:0", Run("base", 4, ("q_proj",)))

    def come_and_go() -> None:
        while not ends.is_set():
            for _ in range(2):  # the second replaces the first
                checkpoints.save(path, lambda folder: (folder / "a").write_text("x") and None, {}, overwrite=True)
            checkpoints.delete(path)

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(come_and_go)
        try:
            listed = [len(checkpoints.described("a:train:0")[1]) for _ in range(600)]
        finally:
            ends.set()
        changes.result()
    assert {*listed} == {0, 1}


def test_a_checkpoint_is_replaced_where_it_may_be(tmp_path: Path):
    checkpoints, path = Checkpoints(tmp_path), "tinker://a:train:0/weights/x"
    checkpoints.begin("a:train:0", Run("base", 4, ("q_proj",), {"b": "c"}))
    assert checkpoints.run("a:train:0") == Run("base", 4, ("q_proj",), {"b": "c"})
    with pytest.raises(UserError, match="there is no checkpoint"):
        checkpoints.folder(path)
    for number in (1, 2):
        write = lambda folder, number=number: (folder / "file").write_text(str(number))  # noqa: E731
        checkpoints.save(path, write, {"count": np.array(number)}, overwrite=number == 2)
        assert (checkpoints.folder(path) / "file").read_text() == str(number)
        assert checkpoints.optimizer(path)["count"] == number
    with pytest.raises(UserError, match="is there already"):
        checkpoints.save(path, write, None, overwrite=False)
    checkpoints.save(path, write, None, overwrite=True)
    with pytest.raises(UserError, match="holds weights to sample from"):
        checkpoints.optimizer(path)
    with pytest.raises(UserError, match="no training run b"):
        checkpoints.run("b")


# What is computed.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> InferenceModel:
    folder = model_folder(tmp_path_factory.mktemp("base") / "llama")
    return InferenceModel(InferenceOptions(str(folder), slots=4, length=LENGTH))


def computes(service: Service) -> Compute:
    assert service.params is not None
    return Compute(service.engine, service.params, RANK, LENGTH)


@pytest.fixture(scope="module")
def compute(base: InferenceModel) -> Iterator[Compute]:
    service = Service(base, adapters=True, devices=jax.devices()[:1])
    yield computes(service)
    service.batches.close()


def test_a_rank_that_no_matrix_has_is_refused(compute: Compute):
    with pytest.raises(UserError, match=r"--rank 32: .* 32 is above 16, the most that k_proj's matrix can have"):
        Compute(Engine(compute.model, compute.mesh, max_length=8), compute.frozen, 32, LENGTH)


@pytest.mark.slow
def test_gradients_are_the_trainers(base: InferenceModel, compute: Compute):
    """A sum over tokens is the trainer's mean over sequences of sums, times their number. Its client has an adapter of
    exactly the rank and the modules that are trained."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    params = {name: jnp.asarray(x) for name, x in compute.fresh(3, 4, modules).items()}
    # B is 0 at first, and A has no gradient then.
    params |= {
        name: compute.widened({name: 0.1 * np.random.default_rng(5).normal(size=x.shape)})[name]
        for name, x in compute.narrowed(params, 4, modules).items()
    }
    data = [datum(n, n, weights=0.5 + n % 3) for n in (1, 5, 30, 63)]
    outputs, sums = compute.backward(Adapter(params, RANK / 4), compute.zeros(params), data, Chosen())
    exactly = AdapterConfig(rank=4, alpha=32, targets=modules)
    client = tunix.client({"path": base.options.model, "dtype": "float32"}, adapter=exactly, length=LENGTH)
    narrow = {name: jnp.asarray(x) for name, x in compute.narrowed(params, 4, modules).items()}
    places = {name: x.sharding for name, x in client.state.params.items()}
    assert places.keys() == narrow.keys()
    client.state = replace(client.state, params={name: jax.device_put(x, places[name]) for name, x in narrow.items()})

    def weighted(inputs: LossInputs) -> LossOutputs:
        return LossOutputs({"nll": Term(-inputs.batch.per_token["w"] * inputs.logprobs, 1.0)})

    sequences = [
        Sequence(
            np.append(x.tokens, x.inputs["target_tokens"][-1]).astype(np.int32),
            np.arange(len(x.tokens) + 1) > 0,
            per_token={"w": np.append(0, x.inputs["weights"])},
        )
        for x in data
    ]
    metrics = client.forward_backward(pack(sequences, len(data), LENGTH), Loss(weighted))
    total = sum(float(x.sum()) for x in outputs.losses)
    assert float(metrics["train/loss"]) * len(data) == pytest.approx(total, rel=1e-5)
    theirs = client.learner.gradients
    assert theirs is not None
    for name, ours in compute.narrowed(sums, 4, modules).items():
        np.testing.assert_allclose(ours, len(data) * np.asarray(theirs[name]), rtol=1e-4, atol=1e-5, err_msg=name)
    for name, x in sums.items():  # what is not trained has no gradient, so that it stays 0
        trained = compute.widened({name: np.ones_like(narrow[name])})[name] if name in narrow else 0
        assert not np.any(np.asarray(x) * (1 - np.asarray(trained))), name
    for lp, (x, score) in zip(outputs.logprobs, zip(data, client.logprobs(sequences), strict=True), strict=True):
        np.testing.assert_allclose(lp, score[1:], atol=1e-5)
        assert lp.shape == x.tokens.shape


@pytest.mark.slow
def test_updates_are_torchs(compute: Compute):
    import torch

    params = compute.fresh(3, RANK, compute.modules)
    name = next(iter(params))
    weight = torch.nn.Parameter(torch.tensor(np.asarray(params[name])))
    theirs = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    moments = compute.moments(params)
    for step in range(4):
        gradients = compute.zeros(params)
        gradients[name] = gradients[name] + jax.random.normal(jax.random.key(step), params[name].shape) * (step % 3)
        clip = 0.5 if step == 2 else 0.0
        params, moments, norm = compute.update(
            params, moments, gradients, Step(0.01, weight_decay=0.1, grad_clip_norm=clip)
        )
        weight.grad = torch.tensor(np.asarray(gradients[name]))
        assert norm == pytest.approx(float(weight.grad.norm()), rel=1e-5)
        if clip:
            torch.nn.utils.clip_grad_norm_([weight], clip)
        theirs.step()
        np.testing.assert_allclose(np.asarray(params[name]), weight.detach().numpy(), atol=1e-6)


# The addresses.


@pytest.mark.slow
def test_the_base_is_held_once(base: InferenceModel, tmp_path: Path):
    """The stacks of all layers are those that train and that the engine has published, its views of a layer are there
    once each, and tables are the same arrays for all."""

    def held() -> Counter[tuple[int, ...]]:
        gc.collect()  # what earlier tests have left in circles
        return Counter(x.shape for x in jax.live_arrays())

    before = held()
    with served(base, tmp_path) as (tenants, _):
        tenants.compute.forward(tenants.compute.nothing, [datum(5)], Chosen())
        more, shapes = held() - before, tenants.compute.model.shapes
        layers = base.source.decoder.num_layers
        gate, down = shapes["layers/gate/w"], shapes["layers/down/w"]
        assert more[shapes["embed/w"]] == 2, "the tables of tokens and of the head"
        assert (more[gate], more[down]) == (2, 1)  # the ups have the shape of the gates
        assert sum(more[x] for x in {gate[1:], down[1:]}) == 3 * layers


def sequences(seed: int, number: int = 3) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 200, 6 + 5 * i).astype(np.int32) for i in range(number)]
    return [Sequence(tokens, np.arange(len(tokens)) > 2) for tokens in rows]


def with_head(folder: Path, name: str, other: str) -> None:
    """Copies a checkpoint, to which a head is added as PEFT writes it."""
    shutil.copytree(folder / name, folder / other)
    settings, weights = folder / other / "adapter_config.json", folder / other / "adapter_model.safetensors"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "modules_to_save": ["lm_head"]}))
    arrays = load_file(weights)
    width = next(x.shape[1] for key, x in arrays.items() if "q_proj.lora_A" in key)
    save_file({**arrays, "base_model.model.lm_head.weight": np.zeros((VOCAB, width), np.float32)}, weights)


def test_a_light_client_trains_and_samples(base: InferenceModel, tmp_path: Path):
    with served(base, tmp_path) as (_, url):
        client, data = tunix.connect(url.removesuffix("/api/v1"), rank=4, seed=1), sequences(0)
        assert (client.model, client.length) == (base.options.model, LENGTH)

        def step() -> float:
            loss = client.forward_backward(data)["loss:sum"]
            assert client.optim_step(learning_rate=1e-2)["grad_norm"] > 0
            return loss

        nll = -sum(float(lp[x.loss_mask].sum()) for lp, x in zip(client.logprobs(data), data, strict=True))
        losses = [step() for _ in range(4)]
        assert losses[0] == pytest.approx(nll, rel=1e-5)
        assert losses[-1] < 0.9 * losses[0]
        # With the optimizer's state it goes on as before.
        path, after = client.save("four"), [step(), step()]
        client.load(path)
        assert [step(), step()] == after
        with_head(tmp_path / client.run / "weights", "four", "head")
        with pytest.raises(UserError, match=r"weights/head has head/w, which this server does not train"):
            client.load(path.replace("four", "head"))
        # What is published is sampled, and its log-probs are the model's.
        client.publish()
        prompts = [x.tokens[:5] for x in data[:2]]
        groups = client.sample(prompts, 3, Sampling(max_tokens=6, stop_ids=(1,)), seed=5)
        for prompt, group in zip(prompts, groups, strict=True):
            assert len({tuple(x.tokens) for x in group}) == 3
            wholes = [np.append(prompt, x.tokens).astype(np.int32) for x in group]
            scored = client.logprobs([Sequence(whole, np.ones(len(whole), bool)) for whole in wholes])
            for completion, score in zip(group, scored, strict=True):
                np.testing.assert_allclose(completion.logprobs, score[5:], atol=1e-5)
        again = client.sample(prompts, 3, Sampling(max_tokens=6, stop_ids=(1,)), seed=5)
        assert [x.tokens.tolist() for x in again[1]] == [x.tokens.tolist() for x in groups[1]]
        # A reward for what was sampled, and a penalty for the first.
        rewarded = [
            Sequence(
                np.append(prompts[0], x.tokens).astype(np.int32),
                np.arange(5 + len(x.tokens)) >= 5,
                per_token={
                    "logprobs": np.append(np.zeros(5), x.logprobs),
                    "advantages": np.full(5 + len(x.tokens), -1.0 if x is groups[0][0] else 1.0),
                },
            )
            for x in groups[0]
        ]
        # On policy the ratio is 1: the loss is the sum of -A over tokens.
        expected = sum(len(x.tokens) for x in groups[0][:1]) - sum(len(x.tokens) for x in groups[0][1:])
        for loss in ("importance_sampling", "ppo"):
            assert client.forward_backward(rewarded, loss)["loss:sum"] == pytest.approx(expected, abs=1e-3)
        for wrong, says in (
            (lambda: client.forward_backward(data, "ppo"), "sequence 0 lacks logprobs, advantages in per_token"),
            (lambda: client.forward_backward(data, "cross_entropy", {"a": 1.0}), "cross_entropy has no 'a'"),
            (lambda: client.forward_backward([]), "there is no datum"),
            (lambda: client.save("a b"), "is no path of a checkpoint"),
            (lambda: client.optim_step(-1.0), "optim_step: adam_params.learning_rate: Input should be greater"),
            (lambda: client.load(path[:-1]), "there is no checkpoint"),
            (lambda: client.sample(prompts, 1, Sampling(min_p=0.1), 0), "a server has no min_p"),
            (lambda: client.sample([np.arange(90)], 1, Sampling(), 0), "90 tokens, which leaves no room"),
            (lambda: tunix.connect(url.removesuffix("/api/v1"), rank=9), "this server trains 1 to 8"),
            (lambda: tunix.connect("http://127.0.0.1:9"), "start one with `tunix serve MODEL --train FOLDER`"),
        ):
            with pytest.raises(UserError, match=says):
                wrong()
        # Checkpoints can be listed, described and deleted.
        shutil.rmtree(tmp_path / client.run / "weights" / "head")
        with httpx.Client(base_url=url) as http:
            run = http.get(f"/training_runs/{client.run}").json()
            assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (4, path)
            (listed,) = http.get(f"/training_runs/{client.run}/checkpoints").json()["checkpoints"]
            assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("weights/four", "training")
            assert listed["size_bytes"] > 1000
            assert http.get("/checkpoints?limit=1").json()["checkpoints"] == [listed]
            every = http.get("/training_runs?limit=1&offset=1").json()
            assert (every["training_runs"], every["cursor"]) == ([], {"offset": 1, "limit": 1, "total_count": 1})
            assert http.get("/checkpoints?limit=x").status_code == 400
            about = http.post("/weights_info", json={"tinker_path": path}).json()
            assert about == {
                "base_model": client.model,
                "is_lora": True,
                "lora_rank": 4,
                "train_unembed": False,
                "train_mlp": True,
                "train_attn": True,
            }
            where = f"/training_runs/{client.run}/checkpoints/weights/four"
            assert [http.delete(where).status_code for _ in range(2)] == [200, 404]
            for missing in ("/training_runs/x", "/training_runs/../checkpoints", "/training_runs/%2e%2e/checkpoints"):
                assert http.get(missing).status_code in (200, 404), missing
            assert http.get("/training_runs/%2e%2e/checkpoints").status_code == 404
            assert http.get("/checkpoints").json()["checkpoints"] == []
        with pytest.raises(UserError, match="there is no checkpoint"):
            client.load(path)
        # Gradients that are no numbers are said, and end nothing.
        client.forward_backward([replace(x, weight=1e38) for x in data])
        assert not np.isfinite(client.optim_step(1e-3)["grad_norm"])
        client.close()


@pytest.mark.slow
def test_samplers_are_answered_together(base: InferenceModel, tmp_path: Path):
    """Six clients sample at once with adapters of their own, two more than have a place, while the other door answers
    a long request: what each gets is what it gets alone. A session that ends frees what it has asked for."""
    with served(base, tmp_path) as (tenants, url):
        address = url.removesuffix("/api/v1")
        clients = [tunix.connect(address, rank=1 + i, seed=i) for i in range(6)]
        sampling, prompts = Sampling(max_tokens=20, stop_ids=(0,)), [x.tokens[:6] for x in sequences(7)]
        for number, client in enumerate(clients):
            for _ in range(3):
                client.forward_backward(sequences(number))
                client.optim_step(learning_rate=0.03)
            client.publish()
        alone = [client.sample(prompts, 2, sampling, seed=3) for client in clients]
        body = {"model": tenants.name, "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "temperature": 0}

        def completed() -> str:
            return httpx.post(f"{address}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

        plain = completed()
        with ThreadPoolExecutor(7) as pool:
            other = pool.submit(completed)
            together = list(pool.map(lambda client: client.sample(prompts, 2, sampling, seed=3), clients))
            assert other.result() == plain
        for groups, others in zip(alone, together, strict=True):
            for group, other in zip(groups, others, strict=True):
                for x, y in zip(group, other, strict=True):
                    assert x.tokens.tolist() == y.tokens.tolist()
                    np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)
        assert len({tuple(x[0][0].tokens) for x in alone}) > 3, "adapters differ"
        with ThreadPoolExecutor(1) as pool:
            tenants._batches.pause()
            waiting = pool.submit(clients[0].sample, prompts, 40, sampling, 4)
            while sum(tenants._batches.load) < 120:
                time.sleep(0.01)
            clients[1]._call(f"sessions/{clients[0]._session}/finish", {})
            with pytest.raises(UserError, match="has ended"):
                waiting.result()
            assert tenants._batches.load == (0, 0)
            tenants._batches.resume()
        assert clients[1].sample(prompts, 2, sampling, 3)[0][0].tokens.tolist() == alone[1][0][0].tokens.tolist()


def test_a_key_is_wanted_of_this_door_too(base: InferenceModel, tmp_path: Path, shared: tuple[Service, str]):
    with pytest.raises(UserError, match=r"create_session: POST .* Start it with --train FOLDER"):
        tunix.connect(shared[1])
    with served(base, tmp_path, Gate("tml-key")) as (_, url):
        answer = httpx.get(f"{url}/healthz")
        assert (answer.status_code, list(answer.json())) == (401, ["detail"])
        assert httpx.get(f"{url}/healthz", headers={"x-api-key": "tml-key"}).status_code == 200
        assert list(httpx.get(f"{url}/no", headers={"x-api-key": "tml-key"}).json()) == ["detail"]
        with pytest.raises(UserError, match="create_session: the key lacks or is wrong"):
            tunix.connect(url.removesuffix("/api/v1"), key="tml-other")


def test_a_model_whose_session_ends_meanwhile_is_not_kept(
    base: InferenceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with served(base, tmp_path) as (tenants, url):
        monkeypatch.setattr(tenants.checkpoints, "begin", lambda model, _: tenants.end(model.partition(":")[0]))
        with pytest.raises(UserError, match="has ended"):
            tunix.connect(url.removesuffix("/api/v1"), rank=4)
    assert not tenants.models


@contextmanager
def served(base: InferenceModel, folder: Path, gate: Gate | None = None) -> Iterator[tuple[Tenants, str]]:
    """A door that listens."""
    service = Service(base, adapters=True, devices=jax.devices()[:1])
    tenants = Tenants(base, computes(service), service.batches, service.publish_unlisted, folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = server_of(service, gate, [Mount("/api/v1", routes=Door(tenants).routes())])
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield tenants, f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1"
        finally:
            server.should_exit = True
            thread.join()
            service.batches.close()
            tenants.close()


@pytest.mark.slow
def test_bad_requests_are_answered_in_the_protocols_form(base: InferenceModel, tmp_path: Path):
    """Each has one clear answer; after all of them the model trains as one that never saw them."""
    with served(base, tmp_path) as (tenants, url), httpx.Client(base_url=url, timeout=300) as http:

        def post(path: str, body: Any) -> httpx.Response:
            return http.post(f"/{path}", **({"content": body} if isinstance(body, bytes) else {"json": body}))

        def result(request_id: str) -> Any:
            while (response := post("retrieve_future", {"request_id": request_id})).status_code == 408:
                pass
            return response

        for version in ("0.37.1", "0.39.0", "x", None):
            refused = post("client/config", {"sdk_version": version})
            assert refused.status_code == 400
            assert "<0.39,>=0.38" in refused.json()["detail"]
        assert http.get("/healthz", headers={"x-sdk-version": "0.20.0"}).status_code == 400
        assert post("client/config", {"sdk_version": "0.38.0"}).json() == {}
        session = post("create_session", {"sdk_version": "0.38.0", "tags": []}).json()["session_id"]
        made = {"session_id": session, "base_model": tenants.name, "lora_config": {"rank": 4, "seed": 1}}

        def create(number: int, **changes: Any) -> str:
            body = {**made, "model_seq_id": number, "optimizer_config": {"type": "adamw"}, **changes}
            return post("create_model", body).json()["request_id"]

        assert result(create(0)).json() == {"type": "create_model", "model_id": f"{session}:train:0"}
        for number, (changes, says) in enumerate(
            [
                ({"base_model": "other"}, "base_model: other is not served here"),
                ({"lora_config": {"rank": 9}}, "lora_config.rank: 9; this server trains 1 to 8"),
                ({"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}}, "nothing would train"),
            ],
            start=1,
        ):
            answer = result(create(number, **changes)).json()
            assert says in answer["error"]
            assert answer["category"] == "user"
        dimuon = post("create_model", {**made, "model_seq_id": 9, "optimizer_config": {"type": "dimuon"}})
        assert (dimuon.status_code, dimuon.json()["detail"].split(":")[0]) == (400, "optimizer_config.type")
        model, data = f"{session}:train:0", [datum(5, weights=1.0)]

        def train(number: int, data: list[Datum], loss: str = "cross_entropy", **fields: Any) -> httpx.Response:
            named = {"model_id": model, "seq_id": number, **fields}
            return post("forward_backward", message(data, loss, **named).SerializeToString())

        def failure(number: int, *arguments: Any, **fields: Any) -> str:
            return result(train(number, *arguments, **fields).json()["request_id"]).json()["error"]

        assert train(1, data, model_id="no:train:0").status_code == 404
        assert train(0, data).status_code == 400
        assert post("forward_backward", b"\xff\xff").json()["detail"].startswith("the body is no protobuf")
        short = Datum(data[0].tokens, {**data[0].inputs, "target_tokens": data[0].inputs["target_tokens"][:3]})
        assert "'gspo' is not computed here" in failure(1, data, "gspo")
        assert "target_tokens has the shape [3] for 5 tokens of model_input" in failure(2, [short])
        assert "has 65 tokens; 1 to 64 can be read" in failure(3, [datum(65, weights=1.0)])
        assert "this loss reads advantages, logprobs, target_tokens" in failure(4, data, "ppo")
        assert "outside of the vocabulary" in failure(5, [Datum(data[0].tokens + 900, data[0].inputs)])
        assert "holds a value that is not finite" in failure(6, [datum(5, weights=np.nan)])
        assert "there is no datum" in failure(7, [])
        named = train(8, data, forward_only=True).json()["request_id"]
        assert train(8, data, forward_only=True).json()["request_id"] == named
        again = train(8, [datum(6, weights=1.0)], forward_only=True)
        assert again.status_code == 400
        assert "another body" in again.json()["detail"]
        assert result(named).headers["content-type"] == "application/x-protobuf"
        for path, body, says in (
            ("optim_step", {"model_id": model}, "seq_id: Field required"),
            ("optim_step", {"model_id": model, "seq_id": 9, "adam_params": {"learning_rate": -1}}, "learning_rate"),
            ("optim_step", {"model_id": model, "seq_id": 9, "adam_params": {"beta3": 1}}, "adam_params.beta3"),
            ("optim_step", b"[1]", "the body is an object"),
            ("optim_step", b"{", "the body is no JSON"),
            ("asample", {"sampling_session_id": "x", "seq_id": 0}, "prompt: Field required"),
            (
                "asample",
                {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1 << 70]}]}},
                "prompt.chunks.0.tokens.0",
            ),
            (
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "base_model": "x"},
                "base_model: x",
            ),
        ):
            refused = post(path, body)
            assert refused.status_code == 400
            assert says in refused.json()["detail"]
        dimuon = {"model_id": model, "seq_id": 9, "optimizer_params": {"type": "dimuon"}}
        assert (
            "'dimuon' is not computed here" in result(post("optim_step", dimuon).json()["request_id"]).json()["error"]
        )
        assert post("retrieve_future", {"request_id": "x"}).status_code == 404
        assert post("session_heartbeat", {"session_id": "x"}).status_code == 410
        # Nothing of it has trained: an update with the sum of no gradients changes nothing.
        before = {name: np.asarray(x) for name, x in tenants.models[model].params.items()}
        step = {"model_id": model, "seq_id": 10, "adam_params": {"learning_rate": 0.1}}
        assert result(post("optim_step", step).json()["request_id"]).json()["metrics"]["grad_norm"] == 0
        assert all((np.asarray(x) == before[name]).all() for name, x in tenants.models[model].params.items())
        # The end of a session fails what waits for a number that never comes.
        waiting = train(12, data).json()["request_id"]
        post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        assert "has ended" in result(waiting).json()["error"]
        assert not tenants.models
        assert train(13, data).status_code == 404
        assert train(1, data, model_id=f"{session}:train:1").status_code == 404, "nor is one whose creation failed"


@pytest.mark.parametrize("number", [10, *slow([10_000])])
def test_no_body_ends_the_tinker_door(base: InferenceModel, tmp_path: Path, number: int):
    """Each refusal has that protocol's form; a client that trains and samples meanwhile is not disturbed."""
    with served(base, tmp_path) as (tenants, url), httpx.Client(base_url=url, timeout=60) as http:
        client, fuzzed = (tunix.connect(url.removesuffix("/api/v1"), rank=rank) for rank in (4, 2))
        session, rng, statuses = fuzzed.run.partition(":")[0], random.Random(number), Counter[int]()
        sampling = {"max_tokens": 2, "seed": 3, "stop": [1], "temperature": 0.5, "top_k": 3, "top_p": 0.9}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        sampler = {"session_id": session, "sampling_session_seq_id": 50, "base_model": client.model}
        adam = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1.0}
        lora, about = {"rank": 2, "seed": 1, "train_mlp": True}, {"a": "b"}
        good: dict[str, dict[str, Any]] = {
            "client/config": {"sdk_version": "0.38.0"},
            "create_session": {"sdk_version": "0.38.0", "tags": ["a"]},
            "session_heartbeat": {"session_id": session},
            "create_model": {"session_id": session, "model_seq_id": 9, "base_model": client.model, "lora_config": lora},
            "get_info": {"model_id": fuzzed.run},
            "optim_step": {"model_id": fuzzed.run, "seq_id": 90, "adam_params": adam},
            "save_weights": {"model_id": fuzzed.run, "seq_id": 91, "path": "a", "user_metadata": about},
            "load_weights": {
                "session_id": session,
                "model_seq_id": 8,
                "path": "tinker://a/weights/b",
                "optimizer": True,
            },
            "create_sampling_session": sampler,
            "asample": {"sampling_session_id": f"{session}:sample:0", "seq_id": 7, "prompt": prompt}
            | {"num_samples": 2, "sampling_params": sampling, "prompt_logprobs": True},
            "retrieve_future": {"request_id": f"{fuzzed.run}:0"},
            "weights_info": {"tinker_path": "tinker://a/weights/b"},
        }
        losses = []
        for i in range(number):
            for path, body in good.items():
                content = mutated(body, rng)
                answer = http.post(f"/{path}", content=content)
                assert answer.status_code in (200, 400, 404, 408, 410), (path, content, answer.text)
                statuses[answer.status_code] += 1
                if answer.status_code >= 400 and answer.status_code != 408:
                    assert list(answer.json()) == ["detail"], (path, content)
            raw = bytearray(message([datum(5, weights=1.0)], model_id=fuzzed.run, seq_id=92).SerializeToString())
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            assert http.post("/forward_backward", content=bytes(raw)).status_code in (200, 400, 404)
            if i % 100 == 0:
                losses.append(client.forward_backward(sequences(0))["loss:sum"])
                client.optim_step(1e-3)
        assert statuses[200] > number
        assert statuses[400] > number
        assert losses == sorted(losses, reverse=True)
        assert tenants.models
