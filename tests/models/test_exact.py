"""bfloat16 that is rounded alike in every program: what is one model gives the same bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks import numerics
from tests.commands.test_quantize import MIXED
from tests.marks import slow
from tests.tiny_models import one_device, row_logprobs
from tests.trainers import PLAIN, RICH, local_client, sequences, trainer
from tunix.data.packing import pack
from tunix.mesh import compiler_options
from tunix.models.families.table import small
from tunix.models.model import Model, Params
from tunix.trainer.trainer import Trainer
from tunix.types import Loss, LossInputs, LossOutputs, Term
from tunix.util.exact import jit

pytestmark = pytest.mark.models


def started(config, rules=None) -> Trainer:
    """float32 masters with a reference, computed in bfloat16; norms are random too, and need more than its 8 bits."""
    plain = trainer(config, dtype="bfloat16", rules=rules)
    rng = np.random.default_rng(0)
    params = {
        name: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype) if "norm" in name else x
        for name, x in plain.learner.params.items()
    }
    return local_client(plain.learner.spec, params, {}, reference=True)


def drift(inputs: LossInputs) -> LossOutputs:
    """The largest difference of policy and reference within one program."""
    assert inputs.reference_logprobs is not None
    apart = jnp.abs(inputs.logprobs - inputs.reference_logprobs)
    return LossOutputs({"loss": Term(-inputs.logprobs)}, peaks={"drift": apart})


@pytest.mark.parametrize(
    "function", [lambda x, y: x @ y, lambda x, y: (x + y) * (x - y), lambda x, y: jax.nn.silu(x) * y]
)
def test_no_cast_is_left_out(function):
    """What bfloat16 arithmetic gives are numbers of bfloat16; of `jax.jit`'s 256 here at most 23 are."""
    x, y = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(ml_dtypes.bfloat16)
    found = np.asarray(jit(lambda x, y: function(x, y).astype(jnp.float32))(x, y))
    np.testing.assert_array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("config", [PLAIN, *slow([RICH])], ids=["plain", "rich"])
def test_before_the_first_update_the_policy_is_its_reference_to_the_bit(config):
    client, given = started(config), sequences(4)
    assert float(client.step(pack(given, 4, 24), Loss(drift, reference=True))["drift"]) == 0.0


@pytest.mark.parametrize(("config", "rules"), [*slow([(RICH, None)]), (PLAIN, MIXED)], ids=["rich", "rounded"])
def test_another_program_gives_the_same_reference(config, rules):
    """The scorer's program is none of the step's, and holds the reference as weights of its own."""
    client, given = started(config, rules), sequences(4)
    for mine, theirs in zip(client.logprobs(given), client.logprobs(given, "reference"), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_is_sampled_and_what_trains_round_alike(monkeypatch):
    """Attention, soft caps and a tanh in the ffn: a bit that differs between two programs reaches every later token."""
    monkeypatch.setattr(numerics, "SIZES", {"d_model": 64, "ffn": 128, "num_layers": 2})
    monkeypatch.setattr(numerics, "NEW", 24)
    found = numerics.distances("gemma2")
    assert found["reference"] == 0
    assert found["mean"] < 1e-3


def test_a_policy_that_is_differentiated_is_that_which_is_not():
    """A backward pass reads more of what a program computes: XLA fuses it otherwise."""
    mesh, config = one_device(), small("gemma2")
    model, options = Model(config, dtype="bfloat16"), compiler_options(mesh, "bfloat16")
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), mesh)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, config.vocab_size, (8, 48)), jnp.int32)
    positions, segments = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32), tokens.shape), jnp.ones_like(tokens)

    def logprobs(params: Params) -> jax.Array:
        return row_logprobs(model, params, tokens, positions, segments, segments > 0)

    def with_gradients(params: Params) -> tuple[jax.Array, tuple[Params]]:
        found, back = jax.vjp(logprobs, params)
        return found, back(found)

    with jax.set_mesh(mesh):
        alone, beside = jit(logprobs, options=options)(params), jit(with_gradients, options=options)(params)[0]
    np.testing.assert_array_equal(alone, beside)
