"""The reference's log-probs of all rows, asked once before the first step and kept beside them.

Sequences in file order -> chunks -> log-probs of their trained tokens -> one shard a chunk, `00000.safetensors`, in a
folder that is named by a digest of what they follow from: the rows as they are rendered, every weight, the precision.
A shard is written in one go, so that what was interrupted goes on behind the last one. The reference is another model
where the recipe names one, the base under an adapter, else the weights as the run starts from them: nothing is held for
it afterwards.

Axes: T time.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tunix.errors import UserError
from tunix.models.model import Params
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.types import Sequence
from tunix.util.atomic_io import write_bytes_atomic
from tunix.util.exact import jit

CHUNK = 512
"""Sequences of a shard, and of a call of the model."""
VALUES, ABOUT = "logprobs", "about"
"""Names in a shard: the log-probs of all trained tokens one after the other, and what they follow from."""


@dataclass(frozen=True)
class Answers:
    """Log-probs by sequence."""

    found: dict[bytes, np.ndarray]
    """Those of the trained tokens, by `key`."""

    def __call__(self, sequence: Sequence) -> np.ndarray:
        """`[T]` log-probs of a sequence's trained tokens, 0 elsewhere."""
        values = np.zeros(len(sequence.tokens), np.float32)
        values[trained(sequence)] = self.found[key(sequence)]
        return values


def precompute(
    sequences: Iterable[Sequence], trainer: Trainer, precision: str, data: str, run: Path, display: Display
) -> Answers:
    """The log-probs of sequences, computed where they are not stored yet.

    Args:
        trainer: before its first step.
        precision: of the computation.
        data: what the recipe calls its training rows: beside a local file the shards are kept.
        run: the run folder, where they are kept otherwise.
        display: is told how far it is.

    Raises:
        UserError: a shard is damaged or of something else, or the disk refuses it.
    """
    asked = {key(sequence): sequence for sequence in sequences}
    weights = trainer.reference if trainer.has_reference else trainer.params
    about = digest([digest(asked), digest_of_weights(weights), precision])
    folder = _folder(data, run, about, display)
    values: list[np.ndarray] = []
    for number, chunk in enumerate(_chunks(list(asked.values()))):
        file = folder / f"{number:05d}.safetensors"
        if not file.exists():
            found = _computed(chunk, trainer)
            write_bytes_atomic(file, save({VALUES: np.concatenate(found)}, metadata={ABOUT: about}))
            done = min((number + 1) * CHUNK, len(asked))
            display.say(f"reference: {done} of {len(asked)} sequences in {folder}")
        values += _stored(file, chunk, about)
    return Answers(dict(zip(asked, values, strict=True)))


def trained(sequence: Sequence) -> np.ndarray:
    """`[T]` bool: the targets. The first token never is one."""
    mask = sequence.loss_mask.astype(bool)
    mask[:1] = False
    return mask


def key(sequence: Sequence) -> bytes:
    """What a sequence's log-probs are found by: its tokens and which of them are trained."""
    tokens = np.ascontiguousarray(sequence.tokens, np.int32)
    return hashlib.sha256(tokens.tobytes() + trained(sequence).tobytes()).digest()


def digest(parts: Iterable[bytes | str]) -> str:
    """Of several parts in their order."""
    told = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def digest_of_weights(params: Params) -> str:
    """Of every bit of every weight, computed where they lie: however they are sharded, it is the same."""
    sums = {name: _checksum(x) for name, x in sorted(params.items())}
    return digest(f"{name} {params[name].shape} {params[name].dtype} {int(x)}" for name, x in sums.items())


@jit
def _checksum(array: jax.Array) -> jax.Array:
    """Sum modulo 2^32 of the bits of each element times an odd number of its place: whole numbers add up exactly."""
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        place = place * jnp.uint32(1_000_003) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return jnp.sum((bits ^ (bits >> 15)) * (2 * place + 1), dtype=jnp.uint32)


def _chunks(sequences: List[Sequence]) -> Iterator[List[Sequence]]:
    for start in range(0, len(sequences), CHUNK):
        yield sequences[start : start + CHUNK]


def _computed(chunk: List[Sequence], trainer: Trainer) -> list[np.ndarray]:
    """Of each sequence the log-probs of its trained tokens."""
    found = trainer.logprobs(chunk, "reference" if trainer.has_reference else "policy")
    return [values[trained(sequence)] for values, sequence in zip(found, chunk, strict=True)]


def _stored(file: Path, chunk: List[Sequence], about: str) -> list[np.ndarray]:
    """The log-probs in a shard, by sequence.

    Raises:
        UserError: it holds others.
    """
    lengths = [int(trained(sequence).sum()) for sequence in chunk]
    try:
        with safe_open(file, "np") as shard:
            told, values = (shard.metadata() or {}).get(ABOUT), shard.get_tensor(VALUES)
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read ({error}): delete it, and it is computed anew") from error
    if told != about or len(values) != sum(lengths):
        raise UserError(
            f"{file} holds a reference's log-probs of another data set, model or precision: delete it, and they are "
            "computed anew"
        )
    return np.split(values, np.cumsum(lengths)[:-1])


def _folder(data: str, run: Path, about: str, display: Display) -> Path:
    """Where the shards are kept: beside a local file, else in the run folder."""
    file = Path(data).expanduser()
    beside = file.is_file() and os.access(file.parent, os.W_OK)
    start = file.with_name(f"{file.name}.reference-") if beside else run / "reference-"
    folder = start.with_name(f"{start.name}{about[:12]}")
    others = [x.name for x in sorted(start.parent.glob(f"{start.name}*")) if x != folder]
    if others and not folder.exists():
        display.say(f"{', '.join(others)}: of other rows, another model or precision; the reference is asked anew")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    return folder
