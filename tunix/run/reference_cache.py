"""The reference's log-probs of all rows, computed once before the first step and stored alongside the rows.

Sequences in file order -> chunks -> log-probs of their trained tokens -> one shard a chunk, `00000.safetensors`, in a
folder that is named by a digest of everything that determines them: the rendered rows, all weights, the precision.
Each shard is written atomically, so an interrupted computation continues after the last one. The reference is the base
under an adapter, else the initial weights of the run. It needs no memory afterwards.

Axes: T time.
"""

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.run.inputs import Inputs
from tunix.run.setup import Setup
from tunix.trainer.digest import digest
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.types import Sequence
from tunix.util.atomic_io import replacing

CHUNK = 512
"""Number of sequences in a shard, and in a call of the model."""
VALUES, ABOUT = "logprobs", "about"
"""Keys of a shard: the concatenated log-probs of all trained tokens, and the digest in its metadata."""


def reference_logprobs(
    setup: Setup, inputs: Inputs, client: Trainer, run: Path, display: Display
) -> Callable[[Sequence], np.ndarray]:
    """The reference's log-probs of all given sequences of a run, held-out ones included, computed where they are not
    stored yet, by a client that has taken no step; then its weights are freed.

    Returns:
        A function of a sequence: the `[T]` log-probs of its trained tokens, 0 elsewhere.

    Raises:
        UserError: a shard is damaged or belongs to other inputs, or cannot be written.
    """
    recipe, kind = setup.recipe, setup.recipe.algorithm.reads
    sequences = inputs.examples(inputs.train, recipe.data, kind).sequences()
    if inputs.held_out is not None:
        held_out = inputs.examples(inputs.held_out, recipe.data, kind)
        sequences = itertools.chain(sequences, held_out.sequences(recipe.eval.rows))
    of = "policy" if client.learner.reference is None else "reference"
    unique = {_key(sequence): sequence for sequence in sequences}
    about = digest([digest(unique), client.fingerprint(of), recipe.model.dtype])
    # Next to a local file of rows, else in the run folder.
    rows = Path(recipe.data.train if isinstance(recipe.data.train, str) else run).expanduser()
    writable = rows.is_file() and os.access(rows.parent, os.W_OK)
    start = rows.with_name(f"{rows.name}.reference-") if writable else run / "reference-"
    folder = start.with_name(f"{start.name}{about[:12]}")
    others = [x.name for x in sorted(start.parent.glob(f"{start.name}*")) if x != folder]
    if others and not folder.exists():
        display.say(f"{', '.join(others)}: of other rows, another model or precision; the reference is recomputed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    values: list[np.ndarray] = []
    listed = list(unique.values())
    for number, start in enumerate(range(0, len(listed), CHUNK)):
        chunk = listed[start : start + CHUNK]
        file = folder / f"{number:05d}.safetensors"
        # Computed by all processes together, where any of them has not got it.
        if processes.any_of("reference", not file.exists()):
            logprobs = client.logprobs(chunk, of)
            computed = [values[_trained(sequence)] for values, sequence in zip(logprobs, chunk, strict=True)]
            with replacing(file) as shard:
                shard.write(save({VALUES: np.concatenate(computed)}, metadata={ABOUT: about}))
            done = min((number + 1) * CHUNK, len(unique))
            display.say(f"reference: {done} of {len(unique)} sequences in {folder}")
        lengths = [int(_trained(sequence).sum()) for sequence in chunk]
        try:
            with safe_open(file, "np") as shard:
                origin, stored = (shard.metadata() or {}).get(ABOUT), shard.get_tensor(VALUES)
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read ({error}): delete it, and it is recomputed") from error
        if origin != about or len(stored) != sum(lengths):
            raise UserError(
                f"{file} holds a reference's log-probs of another data set, model or precision: delete it, and they "
                "are recomputed"
            )
        values += np.split(stored, np.cumsum(lengths)[:-1])
    client.learner.reference = None
    by_key = dict(zip(unique, values, strict=True))

    def logprobs_of(sequence: Sequence) -> np.ndarray:
        scattered = np.zeros(len(sequence.tokens), np.float32)
        scattered[_trained(sequence)] = by_key[_key(sequence)]
        return scattered

    return logprobs_of


def _trained(sequence: Sequence) -> np.ndarray:
    """The `[T]` bool mask of trained tokens; the first token is never one."""
    mask = sequence.loss_mask.astype(bool)
    mask[:1] = False
    return mask


def _key(sequence: Sequence) -> bytes:
    """A digest of a sequence's tokens and of which are trained."""
    tokens = np.ascontiguousarray(sequence.tokens, np.int32)
    return hashlib.sha256(tokens.tobytes() + _trained(sequence).tobytes()).digest()
