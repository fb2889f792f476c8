"""Loads the teacher of a recipe: its vocabulary is checked, and its weights are placed on devices."""

from dataclasses import replace

import jax

from tunix.algorithms.distill.config import TeacherConfig
from tunix.config import ModelConfig
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.hf.source import Source, beside, check_tokens, from_scratch, loaded, pretrained
from tunix.lora.adapt import adapt
from tunix.mesh import build_mesh
from tunix.recipe.sections import Sections
from tunix.trainer.frozen_model import Teacher
from tunix.trainer.learner import Learner
from tunix.trainer.mesh_choice import Demand, require
from tunix.trainer.microbatches import Microbatcher, rows_per_microbatch

Devices = list[jax.Device]  # pyright: ignore[reportInvalidTypeForm]  # jax makes it as a variable


def divided(teacher: TeacherConfig | None, devices: Devices | None = None) -> tuple[Devices, Devices]:
    """`(student's, teacher's)` devices: the teacher's are the last ones with `teacher.mesh`, else both share all.

    Raises:
        UserError: no device is left for the student.
    """
    devices = jax.devices() if devices is None else devices
    if teacher is None or teacher.mesh is None:
        return devices, devices
    if processes.number() > 1:
        raise UserError(
            f"teacher.mesh: devices of its own need one process, and there are {processes.number()}: leave it out, and "
            "teacher and student share all devices"
        )
    number = teacher.mesh.size
    if number >= len(devices):
        raise UserError(
            f"teacher.mesh: of {len(devices)} device(s) the teacher's mesh takes {number}, so that none is left for "
            "the student: make it smaller, or leave it out and both share all devices"
        )
    return devices[:-number], devices[-number:]


def teacher_source(recipe: Sections, student: Source) -> Source | None:
    """The structure of the teacher and the location of its weights; None where the recipe has no teacher.

    Raises:
        UserError: there is no such model, its vocabulary is not the student's, or its mesh does not divide it.
    """
    config = recipe.teacher
    if config is None:
        return None
    if config.path is None:
        source = from_scratch(ModelConfig(init="random", family=config.family, sizes=config.sizes))
    else:
        source = pretrained(config.path)
    # Each id has to be the same token for both, since their probabilities are compared. Embeddings may be padded to
    # different sizes; where one has no tokenizer, only the sizes are compared.
    name, sizes = config.path or "the random teacher", (source.decoder.vocab_size, student.decoder.vocab_size)
    if source.tokenizer is not None and student.tokenizer is not None:
        check_tokens("teacher.path", name, source.tokenizer, student.tokenizer)
    elif source.folder is not None and sizes[0] != sizes[1]:
        raise UserError(
            f"teacher.path: {name} has {sizes[0]} ids and the student {sizes[1]}, and one of the two has no tokenizer "
            "that says what they stand for: take a teacher with the student's vocabulary"
        )
    if student.tokenizer is not None and student.tokenizer.vocab_size > sizes[0]:
        raise UserError(
            f"teacher: {name} has {sizes[0]} ids, fewer than the {student.tokenizer.vocab_size} of the student's "
            "tokenizer: take a teacher with the student's vocabulary"
        )
    if config.mesh is not None:
        require(build_mesh(config.mesh, divided(config)[1]), Demand(source.decoder), "teacher.mesh")
    return source


def build_teacher(recipe: Sections, source: Source, student: Source, learner: Learner) -> Teacher:
    """Loads the teacher onto its mesh; a frozen base that it shares with the student is not loaded twice.

    `source` is from `teacher_source`, `student` the source of the weights of `learner`.
    """
    config, students, length = recipe.teacher, learner.spec.mesh, learner.spec.length
    assert config is not None
    mesh = students if config.mesh is None else build_mesh(config.mesh, divided(config)[1])
    trained, frozen = learner.spec.model, learner.frozen
    same_base = (
        student.merged is None
        and student.folder is not None
        and source.folder is not None
        and source.folder.resolve() == student.folder.resolve()
        and source.rounding == trained.quantization
        and trained.dtype == config.dtype
        and bool(frozen)
        and all(x.dtype == config.dtype for name, x in frozen.items() if name not in trained.kinds)
    )
    if config.mesh is None and same_base:
        # The student's frozen weights, with the teacher's unmerged adapter if it has one.
        model, params = replace(trained, adapt=None, has_scalar_head=False), frozen
        if source.merged is not None:
            settings, adapter_params = beside(model, params, learner.spec.mesh, source.merged)
            model, params = replace(model, adapt=adapt(settings, model.config)), {**params, **adapter_params}
    else:
        model, params = loaded(source, config.dtype, mesh)
    size, packing = recipe.sequences_per_update, bool(recipe.data.packing)
    rows = rows_per_microbatch(mesh, size, recipe.micro_batch_size, length, packing)
    return Teacher(model, params, Microbatcher(rows, mesh), length, students)
