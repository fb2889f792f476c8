"""Lines that describe a run when it starts: its model, data and devices."""

import os
from collections.abc import Iterator

from jax.sharding import Mesh

from tunix.models.attention import decode_triton, mosaic
from tunix.models.attention.decoding import described
from tunix.models.attention.tokamax_ops import capability, missing
from tunix.models.kernel_gates import reader_here
from tunix.models.kv_cache import decode_specs
from tunix.models.quantization.formats import bytes_per_weight, is_scale
from tunix.models.quantization.rules import matmuls_line
from tunix.rollout.engine.shapes import PAGE
from tunix.rollout.servers.handover import moves_alone
from tunix.run.inputs import Inputs
from tunix.run.kernels import experts_line
from tunix.run.setup import Setup
from tunix.trainer.frozen_model import Teacher, Teachers
from tunix.trainer.learner import Learner
from tunix.trainer.mesh_choice import memory_of
from tunix.trainer.microbatches import TrainerSpec
from tunix.trainer.progress import readable
from tunix.trainer.sampler_mesh import sampler_mesh
from tunix.util.accelerators import MEMORY, accelerated


def stage_lines(setup: Setup, inputs: Inputs, total: int) -> Iterator[str]:
    """What a run, or a stage of one, does, for people: `sft: 4,000 rows, 400 steps of 256; 8 NVIDIA H100 80GB HBM3`;
    whether it does without a GPU that is there; and what it is measured on.

    The first line of the run has named a single CPU already.
    """
    recipe, first, number = setup.recipe, setup.mesh.devices.flat[0], setup.mesh.size
    on_cpu, most = first.platform == "cpu", "at most " if recipe.eval.until else ""
    devices = "" if on_cpu and number == 1 else f"; {number} {'CPU devices' if on_cpu else first.device_kind}"
    yield f"{recipe.algorithm.name}: {len(inputs.train):,} rows, {most}{total} steps of {recipe.batch_size}{devices}"
    if on_cpu and accelerated():
        yield "this machine has a GPU or a TPU that JAX does not use: pip install '.[gpu]', or '.[tpu]'"
    if (held_out := inputs.held_out) is not None:
        split = "" if held_out.split is None else f", split {held_out.split}"
        shared = "; it is trained on these too, so that eval/* do not show what it makes of new ones"
        shared = shared if held_out.shares_rows_with(inputs.train) else ""
        yield f"held out: {len(held_out):,} rows of {held_out.name}{split}{shared}"


def details(setup: Setup, learner: Learner, inputs: Inputs, total: int, attention: str) -> Iterator[str]:
    """Lines for the log and for `-v`: sizes and memory, and what was chosen where the recipe leaves it to tunix.

    `total` are the steps of the run, `attention` is the line about what computes it.
    """
    recipe, mesh, model, first = setup.recipe, setup.mesh, setup.spec.model, setup.mesh.devices.flat[0]
    decoder, rules, rounding, teacher = setup.source.decoder, recipe.quantization, model.quantization, learner.teacher
    # The weights, the rows, the steps and the devices, with the memory of each.
    trained = sum(x.size for x in learner.state.params.values())
    frozen = sum(x.size for name, x in learner.frozen.items() if not is_scale(name))
    weights = f"{readable(trained)} weights train" + (f", {readable(frozen)} are frozen" if frozen else "")
    configs = () if recipe.teacher is None else recipe.teacher.each.values()
    teachers = teacher.each if isinstance(teacher, Teachers) else () if teacher is None else (teacher,)
    for taught_by, config in zip(teachers, configs, strict=False):  # of one that is stored nothing is here
        if isinstance(taught_by, Teacher) and taught_by.policy is not None:
            weights += ", which teach themselves"
        elif not isinstance(taught_by, Teacher):
            weights += f"; a teacher at {config.path}"
        else:
            unshared = [x.size for name, x in taught_by.params.items() if learner.frozen.get(name) is not x]
            shared = " on the same base" if len(unshared) < len(taught_by.params) else ""
            weights += f"; a teacher of {readable(sum(unshared))}{shared} ({taught_by.model.config.family})"
    if rounding is not None:
        weights += f"; the base's matrices in {rounding.base}, {bytes_per_weight(learner.frozen):.3f} bytes a weight"
    if rules is not None:
        weights += f"; {rules.summary(model.config)}"
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices, memory = f"{mesh.size} x {first.device_kind}", memory_of([first])
    if memory is not None:
        share = f" ({MEMORY}={os.environ.get(MEMORY)})" if first.platform == "gpu" else ""
        devices += f", {memory / 2**30:.1f} GiB of each{share}"
    rows = f"{readable(len(inputs.train))} rows, {total} steps"
    yield f"{decoder.family}: {weights}; {rows}; {devices}{f' ({shape})' if shape else ''}"
    if setup.mesh_reason is not None and mesh.size > 1:
        yield setup.mesh_reason
    # How the layers' matrix products are computed on these devices.
    if rules is not None:
        products = matmuls_line(rules.kinds, model.dtype, simulated=True)
    else:
        products = matmuls_line(
            [] if rounding is None else [(rounding.base, None)], model.dtype, fp8=model.compute == "fp8"
        )
    experts = experts_line(decoder, recipe.model, mesh)
    yield "; ".join(filter(None, (products, attention, experts, remat_line(setup.spec))))
    if setup.samples:
        yield sampling_line(setup)


def device_notes(mesh: Mesh) -> Iterator[str]:
    """Notes of a line each about GPUs that have to do without kernels, and what would help."""
    gpu = mesh.devices.flat[0]
    generation = capability(gpu)
    if generation is None:
        return
    if generation < decode_triton.CAPABILITY:
        yield (
            f"{gpu.device_kind} has compute capability {generation}, and kernels for attention, decoding and experts "
            f"want {decode_triton.CAPABILITY} or more: it works without them, slowly"
        )
    elif int(generation) in mosaic.CAPABILITIES and (reason := missing("attention")):
        yield f"attention does without its fastest kernel: {reason}"


def sampling_line(setup: Setup) -> str:
    """Who reads the pages of slots that decode and why no faster one does, and how the devices are divided to sample
    where that is not as for training; or which servers do, and how they get weights."""
    rollout, spec, sampling = setup.recipe.rollout, setup.spec, setup.sampling_mesh
    if rollout.engine == "vllm":
        what = "the adapter alone" if moves_alone(spec.adapter) else "all weights"
        return f"sampling: by {', '.join(rollout.servers)}; handed over in a folder before each step: {what}"
    mesh, division = sampler_mesh(sampling or spec.mesh, rollout.devices, spec.model, setup.memory)
    if sampling is not None:
        division = f"{division or 'sampling'}, on {sampling.size} device(s) of its own"
    dtype = spec.model.dtype
    cache = decode_specs(spec.model.config, mesh, dtype, rollout.cache_dtype or dtype, PAGE)
    pages = f"pages are read by {described(cache, reader_here(cache, mesh).name)}"
    return f"{division}; {pages}" if division else f"sampling: {pages}"


def remat_line(spec: TrainerSpec) -> str | None:
    """What the backward pass recomputes, and why where that was chosen; None where a recipe leaves it at `none`."""
    if spec.remat_reason is not None:
        return f"remat: {spec.model.remat} (auto: {spec.remat_reason})"
    return None if spec.model.remat == "none" else f"remat: {spec.model.remat}"
