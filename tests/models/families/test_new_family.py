"""A family is one file and one line of the table: a toy one goes from a recipe to samples, and one with experts to a
folder and back."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.models.families.toy import TOY
from tests.tiny_models import one_device
from tests.tiny_runs import losses, train, write_recipe
from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.hf import safetensors_io
from tunix.hf.model_folder import load_params, save_folder
from tunix.hf.source import loaded, pretrained, read_folder
from tunix.mesh import build_mesh
from tunix.models.blocks import FEED_FORWARDS, Auxiliary
from tunix.models.config import DecoderConfig
from tunix.models.families.base import Tensor, axis_sizes
from tunix.models.families.table import FAMILIES
from tunix.models.layers import weight
from tunix.models.model import Model
from tunix.recipe.recipe import Recipe
from tunix.rollout.engine.engine import Engine
from tunix.types import Sampling

pytestmark = pytest.mark.models

ROW = '{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def toy(monkeypatch):
    """The one line."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)


def test_a_new_family_trains_is_read_back_and_sampled(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(str(write_recipe(tmp_path / "recipe.yaml", {"model.family": "toy", "steps": 3})))
    first, *_, last = losses("run")
    assert last < first
    assert "model.layers.1.between.weight" in load_file(tmp_path / "run/export/model.safetensors")

    source = pretrained("run")
    assert source.decoder.family == "toy"
    assert "<|im_end|>" in (tmp_path / "run/export/tokenizer.json").read_text()
    model, params = loaded(source, "float32", one_device())
    engine = Engine(model, one_device(), slots=2, max_length=32)
    engine.publish(params, 1)
    (found,) = engine.sample([np.arange(5, 11, dtype=np.int32)], 2, Sampling(max_tokens=7), seed=0)
    assert [len(one.tokens) for one in found] == [7, 7]


@pytest.mark.parametrize(
    "model",
    [{"path": "me/toyling-7b"}, {"init": "random", "preset": "toyling-1b"}, {"init": "random", "family": "toy"}],
)
def test_a_new_family_is_told_by_hub_id_preset_and_name(toy, tmp_path, model):
    (tmp_path / "rows.jsonl").write_text(ROW)
    recipe = Recipe.build({"model": model, "data": {"train": str(tmp_path / "rows.jsonl")}, "output": "run"})
    assert recipe.tiny().model.family == "toy"


def test_a_new_family_is_told_by_a_folder_and_is_unknown_without_its_line(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "config.json").write_text('{"model_type": "toyling"}')
    sections = {"model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path / "rows.jsonl")}, "output": "run"}
    with pytest.raises(UserError, match=r"does not tell it; set it to one of llama, .*, qwen3_5, .*mixtral$"):
        Recipe.build(sections).tiny()
    with pytest.raises(UserError, match=r"model.family: 'gema' is not one of 'llama', .* Did you mean 'gemma'\?"):
        Recipe.build({**sections, "model": {"init": "random", "family": "gema"}})
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    assert Recipe.build(sections).tiny().model.family == "toy"


@dataclass(frozen=True)
class ExpertsConfig(DecoderConfig):
    """A family may have numbers of its own."""

    members: int = 3


class Bank(nnx.Module):
    """A matrix of each expert."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, str], rngs: nnx.Rngs):
        self.w = weight(rngs, shape, (None, *axes), std=shape[1] ** -0.5)


class Experts(nnx.Module):
    """The mean of all experts, and as auxiliary term the mean square of what they put out."""

    def __init__(self, config: ExpertsConfig, rngs: nnx.Rngs):
        e, d, f = config.members, config.d_model, config.ffn
        self.ups, self.downs = Bank((e, d, f), ("embed", "ffn"), rngs), Bank((e, f, d), ("ffn", "embed"), rngs)

    def __call__(
        self,
        x: jax.Array,
        dropout_keys: jax.Array | None = None,
        real: jax.Array | None = None,
        given: jax.Array | None = None,
    ) -> tuple[jax.Array, Auxiliary]:
        y = jnp.einsum("BTD,EDF->EBTF", x, self.ups.w[...])
        y = jnp.einsum("EBTF,EFD->BTD", jax.nn.silu(y), self.downs.w[...]) / self.ups.w.shape[0]
        return y, {"size": jnp.mean(y**2)}


STEM = "model.layers.{layer}.mlp.experts.{expert}"
SPARSE = replace(
    TOY,
    read=lambda fields: ExpertsConfig(
        **{
            **vars(TOY.read(fields)),
            "family": "sparse",
            "feed_forward": "mean",
            "members": fields.integer("members"),
        }
    ),
    write=lambda config: TOY.write(config) | {"model_type": "sparse", "members": config.members},
    model_types=("sparse",),
    tensors={
        **TOY.tensors,
        "layers/ups/w": Tensor(f"{STEM}.up_proj.weight", "F D", "E D F"),
        "layers/downs/w": Tensor(f"{STEM}.down_proj.weight", "D F", "E F D"),
    },
    axes=lambda config: {**axis_sizes(config), "E": config.members},
)
SMALL = ExpertsConfig(**{**vars(TOY.small), "family": "sparse", "feed_forward": "mean"})


@pytest.fixture
def sparse(monkeypatch) -> Model:
    """A family whose ffn has experts: its file, a line of the families and one of the ffns."""
    monkeypatch.setitem(FAMILIES, "sparse", SPARSE)
    monkeypatch.setitem(FEED_FORWARDS, "mean", Experts)
    return Model(SMALL)


def test_experts_are_tensors_of_their_own_in_a_folder(sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "SHARD", 200_000)
    params = sparse.init(jax.random.key(0), dict.fromkeys(sparse.shapes, "float32"), one_device())
    assert sparse.shapes["layers/ups/w"] == (2, 3, 64, 192)
    save_folder(tmp_path / "one", SMALL, params, source=None, dtype="float32")
    files = list((tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 2
    stored = {key: x for file in files for key, x in load_file(file).items()}
    up = stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    np.testing.assert_array_equal(up, np.asarray(params["layers/ups/w"])[1, 2].T)

    assert read_folder(tmp_path / "one") == SMALL
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    for place in (one_device(), mesh):
        again = load_params(sparse, tmp_path / "one", dict.fromkeys(sparse.shapes, "float32"), place)
        assert again.keys() == params.keys()
        for name, x in params.items():
            np.testing.assert_array_equal(again[name], x, err_msg=name)


def test_a_missing_expert_is_named(sparse, tmp_path):
    params = sparse.init(jax.random.key(0), dict.fromkeys(sparse.shapes, "float32"), one_device())
    params["layers/downs/w"] = params["layers/downs/w"][:, :2]
    save_folder(tmp_path / "one", SMALL, params, source=None, dtype="float32")
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.mlp\.experts\.2\.down_proj\.weight"):
        load_params(sparse, tmp_path / "one", dict.fromkeys(sparse.shapes, "float32"), one_device())


def test_an_expert_is_turned_as_a_matrix_is():
    tensor = Tensor("{layer}.{expert}", "F D", "E D F")
    ours = np.arange(24.0).reshape(4, 2, 3)
    np.testing.assert_array_equal(tensor.read(ours[1].T, ours.shape[1:]), ours[1])
    np.testing.assert_array_equal(tensor.single.turned.read(ours[1], ours.shape[1:]), ours[1])
    assert tensor.keys(5, ours.shape) == ("5.0", "5.1", "5.2", "5.3")


def test_auxiliary_terms_reach_whoever_calls_the_model(sparse):
    """Two layers, each with its term, with gradients; a dense model has none."""
    params = sparse.init(jax.random.key(0), dict.fromkeys(sparse.shapes, "float32"), one_device())
    tokens = jnp.arange(3, 11)[None]
    rows = (tokens, jnp.arange(8)[None], jnp.ones_like(tokens))

    @jax.jit
    def terms(params):
        return jnp.sum(sparse.forward(params, *rows)[1]["size"])

    # Without its down matrices a layer adds nothing to the stream, and its term is 0.
    last_off = {**params, "layers/downs/w": params["layers/downs/w"].at[-1].set(0)}
    assert float(terms(params)) > float(terms(last_off)) > 0
    gradient = jax.grad(terms)(params)["layers/ups/w"]
    assert all(float(jnp.abs(gradient[layer]).max()) > 0 for layer in range(SMALL.num_layers))

    dense = Model(TOY.small)
    empty = {name: jnp.zeros(shape) for name, shape in dense.shapes.items()}
    assert dense.forward(empty, *rows)[1] == {}
