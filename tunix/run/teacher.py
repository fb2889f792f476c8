"""The teacher of a recipe: its vocabulary beside the student's, its devices, its weights."""

from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from tunix.algorithms.distill.config import TeacherConfig
from tunix.config import DType, ModelConfig
from tunix.errors import UserError
from tunix.hf.source import Source, beside, from_scratch, loaded, pretrained
from tunix.hf.vocabulary import check_tokens
from tunix.lora.adapt import adapt
from tunix.mesh import build_mesh
from tunix.models.model import Model, Params
from tunix.recipe.recipe import Recipe
from tunix.trainer.microbatches import Cut, rows_per_pass
from tunix.trainer.teacher import Teacher

Devices = list[jax.Device]  # pyright: ignore[reportInvalidTypeForm]  # jax makes it as a variable


def divided(teacher: TeacherConfig | None) -> tuple[Devices, Devices]:
    """The student's devices and the teacher's: the last ones where it has its own, else the same.

    Raises:
        UserError: none is left for the student.
    """
    devices = jax.devices()
    if teacher is None or teacher.mesh is None:
        return devices, devices
    number = teacher.mesh.size
    if number >= len(devices):
        raise UserError(
            f"teacher.mesh: of {len(devices)} device(s) the teacher's mesh takes {number}, so that none is left for "
            "the student: make it smaller, or leave it out and both share all devices"
        )
    return devices[:-number], devices[-number:]


def teacher_source(recipe: Recipe, student: Source) -> Source | None:
    """The teacher's structure and where its weights are, None where the recipe has none.

    Raises:
        UserError: there is no such model, or its vocabulary is not the student's.
    """
    config = recipe.teacher
    if config is None:
        return None
    if config.path is None:
        source = from_scratch(ModelConfig(init="random", family=config.family, sizes=config.sizes))
    else:
        source = pretrained(config.path)
    _check_vocabulary(config.path or "the random teacher", source, student)
    return source


class Below(NamedTuple):
    """What the student's adapter lies on; the teacher's may lie on it too."""

    source: Source
    """Of the student."""
    model: Model
    """The student."""
    params: Params
    """Its frozen weights; none where all train."""


def build_teacher(recipe: Recipe, source: Source, students: Mesh, length: int, below: Below) -> Teacher:
    """The teacher with its weights on its mesh; a frozen base that is the student's too is there once.

    Args:
        source: what `teacher_source` found.
        students: the mesh of the student.
        length: T of packed rows.
    """
    config = recipe.teacher
    assert config is not None
    mesh = students if config.mesh is None else build_mesh(config.mesh, divided(config)[1])
    if config.mesh is None and _same_base(source, config.dtype, below):
        model, params = _laid(source, below, mesh)
    else:
        model, params = loaded(source, config.dtype, mesh)
    size, packing = recipe.sequences_per_update, bool(recipe.data.packing)
    rows = rows_per_pass(mesh, size, recipe.micro_batch_size, length, packing)
    return Teacher(model, params, Cut(rows, mesh), length, students)


def _same_base(teacher: Source, dtype: DType, below: Below) -> bool:
    """Whether the teacher is the student's frozen weights, as they are or with an adapter of its own."""
    student, frozen = below.source, below.params.values()
    return (
        student.merged is None
        and student.folder is not None
        and teacher.folder is not None
        and teacher.folder.resolve() == student.folder.resolve()
        and teacher.rounding == below.model.quantization
        and below.model.dtype == dtype
        and bool(frozen)
        and all(x.dtype == dtype for name, x in below.params.items() if name not in below.model.kinds)
    )


def _laid(teacher: Source, below: Below, mesh: Mesh) -> tuple[Model, Params]:
    """The teacher as an adapter, not merged, on the student's weights; or as these alone."""
    model = replace(below.model, adapt=None, critic=False)
    if teacher.merged is None:
        return model, below.params
    settings, own = beside(model, below.params, mesh, teacher.merged)
    return replace(model, adapt=adapt(settings, model.config)), {**below.params, **own}


def _check_vocabulary(name: str, teacher: Source, student: Source) -> None:
    """Every id has to be the same token for both: their probabilities are compared.

    Tables may be padded to different sizes; where a side has no tokenizer, there are only their sizes to go by.
    """
    sizes = teacher.decoder.vocab_size, student.decoder.vocab_size
    if teacher.tokenizer is not None and student.tokenizer is not None:
        check_tokens("teacher.path", name, teacher.tokenizer, student.tokenizer)
    elif teacher.folder is not None and sizes[0] != sizes[1]:
        raise UserError(
            f"teacher.path: {name} has {sizes[0]} ids and the student {sizes[1]}, and one of the two has no tokenizer "
            "that says what they stand for: take a teacher with the student's vocabulary"
        )
    if student.tokenizer is not None and student.tokenizer.vocab_size > sizes[0]:
        raise UserError(
            f"teacher: {name} has {sizes[0]} ids, fewer than the {student.tokenizer.vocab_size} of the student's "
            "tokenizer: take a teacher with the student's vocabulary"
        )
