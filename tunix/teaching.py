"""The teacher of a recipe: its vocabulary beside the student's, its devices, its weights."""

import jax
from jax.sharding import Mesh

from tunix.algorithms.distill.config import TeacherConfig
from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh
from tunix.recipe import Recipe
from tunix.source import Source, from_scratch, loaded, pretrained
from tunix.trainer.passes import Cut, rows_per_pass
from tunix.trainer.teacher import Teacher
from tunix.vocabulary import check_tokens

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


def build_teacher(recipe: Recipe, source: Source, students: Mesh, length: int) -> Teacher:
    """The teacher with its weights on its mesh.

    Args:
        source: what `teacher_source` found.
        students: the mesh of the student.
        length: T of packed rows.
    """
    config = recipe.teacher
    assert config is not None
    mesh = students if config.mesh is None else build_mesh(config.mesh, divided(config)[1])
    model, params = loaded(source, config.dtype, mesh)
    size, packing = recipe.sequences_per_update, recipe.data.packing
    rows = rows_per_pass(mesh, size, recipe.micro_batch_size, length, packing)
    return Teacher(model, params, Cut(rows, mesh), length, students)


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
