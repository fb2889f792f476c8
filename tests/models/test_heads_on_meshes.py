"""Both heads where the table is split over devices, against one device: 602 ids are no multiple of parts and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.models import token_logprobs as blocks
from tunix.models.divergence import Side, compared
from tunix.models.token_logprobs import token_logprobs
from tunix.types import Divergence

pytestmark = pytest.mark.models

B, T, V, D, E = 4, 13, 602, 8, 6
MESHES = [MeshConfig(fsdp=2, tensor=4), *slow([MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2)])]


@pytest.fixture(autouse=True)
def several_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 12 tokens; the 151 ids of each of four parts fill a chunk of 128 and begin a second, 301 a third."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 12)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", 12 * 128)


def inputs() -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array]:
    """Student's and teacher's states and tables, targets, needed tokens, and weights of what is found."""
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = (B, T, D), (V, D), (B, T, E), (V, E)
    arrays = tuple(jax.random.normal(key, shape) for key, shape in zip(keys[:4], shapes, strict=True))
    needed = jax.random.bernoulli(keys[5], 0.6, (B, T)).at[1].set(False)
    return arrays, jax.random.randint(keys[4], (B, T), 0, V), needed, jax.random.normal(keys[6], (4, B, T))


def both_heads(arrays, targets, needed, pull):
    """A weighted sum of all that both heads return."""
    student, table, teacher, other = arrays
    bent = {"softcap": 3.0, "entropy": True, "temperature": 1.7}
    # Half of the tokens were drawn from two ids.
    drawn = jnp.where(jnp.arange(T)[:, None] % 2, jnp.stack([targets, (targets + V // 2) % V], -1), -1)
    found = token_logprobs(student, table, targets, needed, candidates=drawn, whole=True, **bent)
    divergence = compared(
        Side(student, table, 3.0), Side(teacher, other, None), targets, needed, Divergence()
    ).divergence
    values = (*found, divergence)
    return sum(jnp.sum(weights * x) for weights, x in zip(pull, values, strict=True)), values


def frozen(arrays, targets, needed, pull):
    """The same of log-probs alone, under a table that does not train."""
    found, *_ = token_logprobs(arrays[0], arrays[1], targets, needed, softcap=None, entropy=False)
    return jnp.sum(pull[0] * found), found


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.fsdp}-{mesh.tensor}")
@pytest.mark.parametrize(("loss", "trained"), [(both_heads, 2), (frozen, 1)], ids=["trained", "frozen"])
def test_values_and_gradients_on_a_mesh_are_those_of_one_device(mesh, loss, trained):
    arrays, *others = inputs()

    def graded(*first):
        return loss((*first, *arrays[trained:]), *others)

    def run():
        return jax.jit(jax.value_and_grad(graded, tuple(range(trained)), has_aux=True))(*arrays[:trained])

    expected = run()
    with jax.set_mesh(build_mesh(mesh)):
        found = run()
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, right, rtol=2e-5, atol=2e-5)
