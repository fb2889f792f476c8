"""Adapters that share a batch: each request is answered as by its adapter alone, and what changes between runs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.test_engine_parity import prompts, random_params, small_engine
from tests.tiny_models import one_device
from tests.trainers import PLAIN, RICH, local_client, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.adapt import adapt, started
from tunix.lora.config import AdapterConfig
from tunix.lora.multi_lora import LoadedAdapter
from tunix.mesh import build_mesh
from tunix.models.config import is_adapter
from tunix.models.model import Model
from tunix.models.quantization.formats import Quantization
from tunix.rollout.engine import batch as batch_file
from tunix.rollout.engine import engine as engine_file
from tunix.trainer.perf import Compilations
from tunix.types import Completion, Request, Sampling, Sequence, Workload

pytestmark = pytest.mark.models

SETTINGS = {
    "wide": AdapterConfig(rank=4, alpha=6.0, ranks={"mlp.*": 3}),
    "narrow": AdapterConfig(rank=2, rslora=True, targets=("q_proj", "down_proj")),
    "turned": AdapterConfig(rank=3, alpha=5.0, dora=True, targets=("self_attn.*", "up_proj")),
    "anchored": AdapterConfig(rank=2, alpha=3.0, start="pissa", targets=("k_proj", "o_proj")),
}
LOSS = SFT(SFTConfig()).objective
GREEDY = Sampling(max_tokens=14, temperature=0.0)


def moved(settings: AdapterConfig, model: Model, base, seed: int) -> LoadedAdapter:
    """An adapter that has been trained: every part of it has moved from where it started."""
    own = replace(model, adapt=adapt(settings, model.config))
    fresh = own.init(jax.random.key(seed), {name: "float32" for name in own.shapes if is_adapter(name)}, one_device())
    fresh = started(settings, own, fresh, base, "float32", one_device())
    rng = np.random.default_rng(seed)
    trained = {name: x for name, x in fresh.items() if not name.endswith("0")}
    return LoadedAdapter(
        settings, fresh | {n: x + 0.2 * rng.standard_normal(x.shape, np.float32) for n, x in trained.items()}
    )


def setting(config, quantization=None, names=tuple(SETTINGS)):
    """A base, and adapters that were trained on it."""
    model = Model(config, quantization=quantization)
    base = random_params(model)
    return model, base, {name: moved(SETTINGS[name], model, base, seed) for seed, name in enumerate(names)}


def mixed_engine(model, base, beside, **options):
    engine = small_engine(model, base, **options)
    engine.publish(base, 1, adapters=beside)
    return engine


def mixture(beside, number: int = 3, sampling: Sampling = GREEDY) -> list[Request]:
    """Every prompt to every adapter and to the base alone, in turns."""
    names = [*beside, None]
    return [
        Request(prompt, sampling, seed=5, index=i, adapter=name)
        for i, prompt in enumerate(prompts(96)[:number])
        for name in names
    ]


def alone(model, base, beside, requests, **options) -> list[Completion]:
    """Each request by an engine whose model has its adapter and no other."""
    found = {}
    for name in [*beside, None]:
        mine = {i: replace(request, adapter=None) for i, request in enumerate(requests) if request.adapter == name}
        laid = beside.get(name)
        own = model if laid is None else replace(model, adapt=adapt(laid.settings, model.config))
        engine = small_engine(own, {**base, **(laid.params if laid else {})}, **options)
        found |= dict(zip(mine, engine.run(list(mine.values())), strict=True))
    return [found[i] for i in range(len(requests))]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "rounded", "names"),
    [
        (PLAIN, None, ("narrow", "turned")),
        *slow([(PLAIN, None, SETTINGS), (RICH, None, SETTINGS), (PLAIN, Quantization("nf4", 16), SETTINGS)]),
    ],
    ids=["two", "plain", "rich", "plain-nf4"],
)
def test_each_request_is_answered_as_by_its_adapter_alone(config, rounded, names):
    """Adapters of all kinds in one batch, more requests than slots, and prompts of several chunks."""
    model, base, beside = setting(config, rounded, tuple(names))
    requests = mixture(beside)
    found = mixed_engine(model, base, beside, slots=6).run(requests)
    assert_same(found, alone(model, base, beside, requests, slots=6))
    # The first prompt's answers differ between all of them, or nothing would have been shown.
    first = [one.logprobs for one in found[: len(beside) + 1]]
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(first) for b in first[:i])


@pytest.mark.slow
def test_draws_replies_and_a_mesh_change_nothing():
    model, base, beside = setting(PLAIN, names=("wide", "turned"))
    drawn = Sampling(max_tokens=12, temperature=0.9, stop_ids=tuple(range(3, 19)))
    requests = mixture(beside, sampling=drawn)

    def reply(_: int, so_far: Completion) -> np.ndarray | None:
        return np.array([40, 41], np.int32) if len(so_far.turns) == 1 else None

    engine = mixed_engine(model, base, beside, slots=4)
    together = engine.run(requests, reply)
    assert any(len(one.turns) == 2 for one in together)
    for request, one in zip(requests, together, strict=True):
        assert_same(engine.run([request], reply), [one])
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])

    def placed(own: Model, params):
        homes = own.shardings(mesh)
        return {name: jax.device_put(x, homes[name]) for name, x in params.items()}

    there = {
        name: LoadedAdapter(s, placed(replace(model, adapt=adapt(s, PLAIN)), own)) for name, (s, own) in beside.items()
    }
    assert_same(mixed_engine(model, placed(model, base), there, slots=4, mesh=mesh).run(requests, reply), together)


def test_a_prompt_is_computed_once_for_each_adapter(monkeypatch):
    model, base, beside = setting(PLAIN, names=("wide", "narrow"))
    engine, computed = mixed_engine(model, base, beside), []
    real = batch_file.prefill

    def spy(model, weights, state, piece):
        computed.extend((int(piece.adapters[0]), at) for at in piece.positions[piece.ids > 0].tolist())
        return real(model, weights, state, piece)

    monkeypatch.setattr(batch_file, "prefill", spy)
    (prompt,) = prompts(96, (9,))
    names = ["wide", None, "narrow", "wide", None, "narrow", "wide"]
    engine.run([Request(prompt, Sampling(max_tokens=3), 0, i, name) for i, name in enumerate(names)])
    # Requests that enter later compute the last token again, from whose state they sample.
    assert [one for one in computed if one[1] < 8] == [(adapter, at) for adapter in (1, 0, 2) for at in range(8)]


@pytest.mark.slow  # tests/rollout/engine/test_engine.py counts what is compiled after warm-up
def test_another_mixture_and_moved_adapters_compile_nothing():
    model, base, beside = setting(PLAIN, names=("wide", "turned"))
    engine = mixed_engine(model, base, beside)
    engine.warm(Workload(requests=9, prompt_length=37, length=64))
    requests = mixture(beside)
    before = engine.run(requests)
    copied = engine.hold().weights.layers[0]["q/w"]
    other = {
        name: LoadedAdapter(x.settings, {key: 0.5 * y for key, y in x.params.items()}) for name, x in beside.items()
    }
    compilations = Compilations()
    for names in ([None] * 9, ["turned"] * 9, ["wide", "turned", "wide"] * 3):
        engine.run([replace(request, adapter=name) for request, name in zip(requests, names, strict=True)])
    engine.publish(base, 2, adapters=other)
    after = engine.run(requests)
    assert compilations.since_warmup == 0
    assert engine.hold().weights.layers[0]["q/w"] is copied
    for request, a, b in zip(requests, before, after, strict=True):
        assert (set(a.versions), set(b.versions)) == ({1}, {2})
        assert np.array_equal(a.logprobs, b.logprobs) == (request.adapter is None)


@pytest.mark.slow
def test_two_trainers_and_an_engine_on_one_frozen_base():
    """They share the base's arrays, and learn what each learns alone; its log-probs are the reference of both."""
    kinds = {"one": AdapterConfig(rank=4), "two": AdapterConfig(rank=2, targets=("q_proj", "up_proj"))}
    alone = {name: trainer(adapter=kind) for name, kind in kinds.items()}
    frozen = trainer(adapter=kinds["one"]).learner.frozen
    ours = {
        name: local_client(one.learner.spec, {key: x.copy() for key, x in one.state.params.items()}, frozen)
        for name, one in alone.items()
    }
    for seed in range(3):
        batch = pack(sequences(6, seed), 6, 24)
        for name in kinds:
            found, expected = (float(each[name].step(batch, LOSS)["train/loss"]) for each in (ours, alone))
            assert found == pytest.approx(expected, abs=1e-6)
    assert all(one.learner.frozen[name] is x for one in ours.values() for name, x in frozen.items())

    model = replace(alone["one"].learner.spec.model, adapt=None)
    engine = engine_file.Engine(model, one_device(), slots=3, max_length=24)
    engine.publish(
        frozen, 1, adapters={name: LoadedAdapter(kinds[name], one.state.params) for name, one in ours.items()}
    )
    assert engine.hold().weights.top["embed/w"] is frozen["embed/w"]
    (prompt,) = prompts(96, (6,))
    for name in (*ours, None):
        sampling = Sampling(max_tokens=8)
        (found,) = engine.run([Request(prompt, sampling, seed=1, adapter=name)])
        whole = Sequence(np.concatenate([prompt, found.tokens]), np.arange(14) >= 6)
        references = [one.logprobs([whole], of="reference") for one in ours.values()]
        for (logprobs,) in references if name is None else [ours[name].logprobs([whole])]:
            np.testing.assert_allclose(found.logprobs, logprobs[6:], atol=1e-4)


def test_what_cannot_be_mixed():
    model, base, beside = setting(PLAIN, names=("wide",))
    engine = mixed_engine(model, base, beside)
    (prompt,) = prompts(96, (3,))
    with pytest.raises(UserError, match="request 1 asks for the adapter 'wild': there are wide"):
        engine.run([Request(prompt, GREEDY, 0), Request(prompt, GREEDY, 0, adapter="wild")])
    with pytest.raises(UserError, match="request 0 asks for the adapter 'wide': none was loaded"):
        small_engine(model, base).run([Request(prompt, GREEDY, 0, adapter="wide")])
    tabled = LoadedAdapter(SETTINGS["wide"], {**beside["wide"].params, "head/w": base["head/w"]})
    with pytest.raises(ValueError, match=r"\['head/w'\] cannot differ between the rows"):
        engine.publish(base, 2, adapters={"tabled": tabled})
    laid = replace(model, adapt=adapt(SETTINGS["wide"], PLAIN))
    with pytest.raises(ValueError, match="has an adapter already"):
        small_engine(laid, {**base, **beside["wide"].params}).publish(base, 2, adapters=beside)
