"""Exports a learner's weights as a Hugging Face folder, or its adapter alone as a PEFT folder."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from tunix.hf.model_folder import save_folder
from tunix.hf.peft_adapter import save_adapter
from tunix.lora.adapt import merge, merge_rounded
from tunix.models.model import Params
from tunix.models.on_grid import rounded
from tunix.models.quantization.rules import Rules
from tunix.trainer.learner import Learner
from tunix.util.exact import jit


@dataclass(frozen=True)
class Exporter:
    """Writes exported folders; the fields are what a folder contains besides the weights."""

    files: Path | None = None
    """Folder whose tokenizer files are copied, e.g. `runs/sft/tokenizer`."""
    rules: Rules | None = None
    """Rounding that was simulated during training (QAT)."""
    base: str = ""
    """The base model that an exported adapter names: a hub id or an absolute path."""
    fingerprint: str | None = None
    """Fingerprint of that base (`hf.base_fingerprint`), as text; None where no folder holds the base."""

    def __call__(self, path: Path, learner: Learner, adapter: bool = False, packed: bool = False) -> float | None:
        """Writes a Hugging Face folder, an adapter merged into its base; or the adapter alone as a PEFT folder.

        A model trained with simulated rounding is written with its rounded weights, or `packed` into few bits. A reward
        model is written as a sequence classifier.

        Returns:
            The relative change that merging made to the matrices of a quantized base; None where none was merged.

        Raises:
            ValueError: `adapter` without a trained adapter, or `packed` without rounding rules.
        """
        spec, scores = learner.spec, not learner.spec.model.has_lm_head
        if packed and self.rules is None:
            raise ValueError("there are no rounded weights to pack: train with rules")
        if adapter and spec.adapter is None:
            raise ValueError("there is no adapter to export: all weights were trained")
        if adapter:
            assert spec.adapter is not None
            about = {"base": self.base, "scores": scores, "fingerprint": self.fingerprint}
            save_adapter(path, learner.state.params, spec.adapter, spec.model.config, **about)
            return None
        whole, moved = (learner.params, None) if packed else _merged(learner)
        about = {"source": self.files, "dtype": spec.model.dtype, "scores": scores, "rules": self.rules}
        save_folder(path, spec.model.config, whole, packed=packed, **about)
        return moved


def _merged(learner: Learner) -> tuple[Params, float | None]:
    """`(weights, moved)`: all weights with the adapter merged and matrices rounded; the relative change of a quantized
    base by merging, or None."""
    spec = learner.spec
    if spec.adapter is None:
        with jax.set_mesh(spec.mesh):
            return rounded(spec.model, learner.params)[0] if spec.model.simulated else learner.params, None
    if spec.model.quantization is None:
        return jit(partial(merge, adapter=spec.adapter))(learner.params), None
    with jax.set_mesh(spec.mesh):
        return merge_rounded(learner.params, spec.adapter, spec.model.dtype)
