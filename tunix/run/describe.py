"""Lines that describe a run when it starts: its model, data and devices."""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from tunix.errors import UserError
from tunix.models.attention.attend import described
from tunix.models.attention.inputs import AttentionSpec
from tunix.models.quantization import hardware
from tunix.models.quantization.formats import bytes_per_weight, is_scale
from tunix.models.quantization.rules import Rules
from tunix.run.inputs import Inputs
from tunix.trainer.learner import Learner
from tunix.trainer.progress import readable
from tunix.trainer.spec import TrainerSpec


def overview(learner: Learner, rules: Rules | None, inputs: Inputs, mesh: Mesh, total: int) -> str:
    """One line about the weights, the rows, the steps and the devices of a run."""
    trained = sum(x.size for x in learner.state.params.values())
    frozen = sum(x.size for name, x in learner.frozen.items() if not is_scale(name))
    weights = f"{readable(trained)} weights train" + (f", {readable(frozen)} are frozen" if frozen else "")
    if learner.teacher is not None:
        params = learner.teacher.params
        unshared = [x.size for name, x in params.items() if learner.frozen.get(name) is not x]
        shared = " on the same base" if len(unshared) < len(params) else ""
        weights += f"; a teacher of {readable(sum(unshared))}{shared} ({learner.teacher.model.config.family})"
    if (rounding := learner.spec.model.quantization) is not None:
        weights += f"; the base's matrices in {rounding.base}, {bytes_per_weight(learner.frozen):.3f} bytes a weight"
    if rules is not None:
        weights += f"; {rules.summary}"
    devices = f"{mesh.size} x {jax.devices()[0].device_kind}"
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"{inputs.source.decoder.family}: {weights}; {readable(len(inputs.train))} rows, {total} steps; "
        f"{devices}{f' ({shape})' if shape else ''}"
    )


def products_line(learner: Learner, rules: Rules | None, mesh: Mesh) -> str:
    """One line about how the layers' matrix products and attention are computed on these devices.

    Raises:
        UserError: the implementation of attention that the recipe names cannot be used here.
    """
    model, platform = learner.spec.model, mesh.devices.flat[0].platform
    if rules is not None:
        products = hardware.line(rules.kinds, model.dtype, platform, simulated=True)
    else:
        rounding = model.quantization
        products = hardware.line([] if rounding is None else [(rounding.base, None)], model.dtype, platform)
    reason = learner.spec.remat_reason
    remat = f"; remat: {model.remat}" + (f" (auto: {reason})" if reason else "")
    line = f"{products}; attention: {attention_of(learner.spec, platform)}"
    return line if model.remat == "none" and reason is None else line + remat


def attention_of(spec: TrainerSpec, platform: str) -> str:
    """Which implementation computes attention within rows of a learner, and why not a faster one.

    Raises:
        UserError: the one that the recipe names cannot.
    """
    config, length = spec.model.config, spec.length
    one = AttentionSpec(
        queries=length // spec.mesh.shape["context"],
        keys=length,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=spec.model.dtype,
        cached=False,
        branched=spec.microbatcher.unit > 1,
        window=None,
        softcap=config.attention_softcap,
        platform=platform,
    )
    try:
        return described([replace(one, window=kind.window) for kind in config.distinct_kinds], spec.model.attention)
    except ValueError as error:
        raise UserError(f"model.{error}. Leave it at auto, which takes what this device has.") from error
