"""Exports trained weights as a Hugging Face folder, or its adapter alone as a PEFT folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from tunix.hf.model_folder import save_folder
from tunix.hf.peft_folder import save_adapter
from tunix.lora.adapt import merge, merge_rounded
from tunix.models.model import Params, rounded
from tunix.models.quantization.rules import Rules
from tunix.trainer.microbatches import TrainerSpec
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
    folder: Path | None = None
    """The folder that the base was loaded from; see `base` of `hf.model_folder.save_folder`."""
    fingerprint: str | None = None
    """Fingerprint of that base (`hf.peft_folder`), as text; None where no folder holds the base."""
    stops: tuple[int, ...] = ()
    """Ids that end a completion, e.g. `(1, 106)`: where the folder is used, turns end as they did in training."""
    card: Callable[[bool], str] | None = None
    """The text of README.md, by whether the adapter is written alone; None for none."""

    def __call__(
        self,
        path: Path,
        spec: TrainerSpec,
        params: Params,
        frozen: Params,
        *,
        adapter: bool = False,
        packed: bool = False,
    ) -> float | None:
        """Writes a Hugging Face folder, an adapter merged into its base; or the adapter alone as a PEFT folder.

        A model trained with simulated rounding is written with its rounded weights, or `packed` into few bits. A reward
        model is written as a sequence classifier.

        Args:
            path: the new folder.
            spec: the model, its adapter and its devices.
            params: the weights that were trained.
            frozen: the others; not read where the adapter is written alone.
            adapter: writes the adapter alone.
            packed: writes rounded weights in few bits.

        Returns:
            The relative change that merging made to the matrices of a quantized base; None where none was merged.

        Raises:
            ValueError: `adapter` without a trained adapter, or `packed` without rounding rules.
        """
        scores = not spec.model.has_lm_head
        if packed and self.rules is None:
            raise ValueError("there are no rounded weights to pack: train with rules")
        if adapter:
            if spec.adapter is None:
                raise ValueError("there is no adapter to export: all weights were trained")
            save_adapter(
                path,
                params,
                spec.adapter,
                spec.model.config,
                tokenizer=None if self.files == self.folder else self.files,
                base=self.base,
                scores=scores,
                fingerprint=self.fingerprint,
                stops=self.stops,
                card=self.card and self.card(adapter),
            )
            return None
        whole, moved = {**frozen, **params}, None
        if not packed and spec.adapter is not None and spec.model.quantization is None:
            whole = jit(partial(merge, adapter=spec.adapter))(whole)
        elif not packed:
            with jax.set_mesh(spec.mesh):
                if spec.adapter is not None:
                    whole, moved = merge_rounded(whole, spec.adapter, spec.model.dtype)
                elif spec.model.simulated:
                    whole = rounded(spec.model, whole)[0]
        save_folder(
            path,
            spec.model.config,
            whole,
            source=self.files,
            dtype=spec.model.dtype,
            scores=scores,
            rules=self.rules,
            packed=packed,
            base=self.folder,
            stops=() if scores else self.stops,
            card=self.card and self.card(adapter),
        )
        return moved
