"""The bytes that a policy's sampler has for keys and values: what the weights and the state of training leave.

They exist while completions are sampled, and so beside the state of training, but not beside its activations.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import jax
from jax.sharding import Mesh

from tunix.models.model import Model
from tunix.trainer.remat import held_by
from tunix.trainer.sampler_mesh import copy_bytes
from tunix.trainer.spec import TrainerSpec

Shapes = Mapping[str, jax.ShapeDtypeStruct]


def room_of(
    share: float,
    memory: float | None,
    mesh: Mesh,
    model: Model,
    trained: Sequence[tuple[TrainerSpec, Shapes, Shapes]],
    *,
    references: int,
    newer: Collection[str] = (),
) -> float | None:
    """Bytes for keys and values on each device; None where its memory is not known, as on a CPU.

    Args:
        share: of the memory that everything may take together, e.g. 0.85; the rest is for the sampler's activations.
        memory: bytes of a device.
        mesh: the sampler's.
        model: what is sampled from.
        trained: spec, trainable and frozen weights of the policy and of a critic that is a model of its own, as far as
            these devices hold them; the policy is the first.
        references: copies of the policy's weights that are kept, 0 or 1.
        newer: names of the weights that arrive while those before them are sampled from.
    """
    if memory is None:
        return None
    held = sum(
        held_by(spec, params, {} if i else frozen, copies=0 if i else references).weights
        for i, (spec, params, frozen) in enumerate(trained)
    )
    copies = copy_bytes(model, model.shapes) + copy_bytes(model, newer)
    return share * memory - held - copies / mesh.shape["tensor"]


def shares(share: float, memory: float, room: float, need: float) -> str:
    """The arithmetic behind a refused share of the memory, and the smallest share that is enough.

    Args:
        share: the one that was refused.
        memory: bytes of a device.
        room: bytes that it leaves for keys and values, less than 0 where not even the rest has room.
        need: bytes for them that are enough.
    """
    rest = share * memory - room
    least = math.ceil(1000 * (rest + need) / memory) / 1000
    verdict = f"the smallest that works is {least:g}" if least <= 1 else "no share of this device is enough"
    return (
        f"{share:g} of {memory / 1e9:.3g} GB is {share * memory / 1e9:.3g} GB, and the weights and the state of "
        f"training take {rest / 1e9:.3g} GB: {verdict}"
    )
