"""Loads the teacher of a recipe: its vocabulary is checked, and its weights are placed on devices."""

from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from tunix.algorithms.distill.config import SHOWN, DistillConfig, OneTeacher
from tunix.config import ModelConfig, RowKind
from tunix.data.chat import turn_end, with_template
from tunix.data.teacher import Spans, StoredTeacher, TeacherChoice, TeacherReader, vocabulary
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import NOT_THE_TEACHERS, Dropped
from tunix.distributed import processes
from tunix.errors import Failure, UserError
from tunix.hf.source import Source, beside, from_scratch, loaded, pretrained
from tunix.lora.adapt import adapt
from tunix.mesh import build_mesh
from tunix.recipe.sections import Sections
from tunix.rollout.servers.chat import Endpoint
from tunix.rollout.servers.probe import TEXT
from tunix.rollout.servers.protocol import ID
from tunix.run.inputs import Inputs
from tunix.trainer.frozen_model import Teacher, Teachers, TextTeacher, at_the_students
from tunix.trainer.learner import Learner
from tunix.trainer.logprobs import Later
from tunix.trainer.mesh_choice import Demand, require
from tunix.trainer.microbatches import Microbatcher, rows_per_microbatch
from tunix.types import Sequence

Devices = list[jax.Device]  # pyright: ignore[reportInvalidTypeForm]  # jax makes it as a variable


def divided(teacher: OneTeacher | None, devices: Devices | None = None) -> tuple[Devices, Devices]:
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


def teacher_sources(recipe: Sections, student: Source) -> list[Source | None]:
    """The structure of each teacher and the location of its weights; None for one that a server has, which is asked for
    the ids of a text. Empty where the recipe has no teacher.

    Raises:
        UserError: there is no such model, its vocabulary is not the student's, or its mesh does not divide it.
    """
    each = {} if recipe.teacher is None else recipe.teacher.each
    return [_source(key, config, student) for key, config in each.items()]


def _source(key: str, config: OneTeacher, student: Source) -> Source | None:
    if config.is_policy:
        return student
    if config.is_stored:
        return None
    if config.is_served:
        if processes.number() > 1:
            raise UserError(
                f"{key}.path: a server is asked by one process, and there are {processes.number()}: load it here"
            )
        with closing(endpoint_of(key, config)) as endpoint:
            check_tokens_of(key, endpoint, student)
        return None
    if config.path is None:
        source = from_scratch(ModelConfig(init="random", family=config.family, sizes=config.sizes))
    else:
        source = pretrained(config.path)
    # Each id has to be the same token for both, since their probabilities are compared. Embeddings may be padded to
    # different sizes; where one has no tokenizer, only the sizes are compared.
    name, sizes = config.path or "the random teacher", (source.decoder.vocab_size, student.decoder.vocab_size)
    if config.align == "text":
        for whose, tokenizer in ((name, source.tokenizer), ("the student", student.tokenizer)):
            if tokenizer is None:
                raise UserError(f"{key}.align: text is what tokenizers write, and {whose} has none: add tokenizer.json")
    elif source.tokenizer is not None and student.tokenizer is not None:
        theirs, ours = (
            {i: repr(token) for token, i in x.hf.get_vocab().items()} for x in (source.tokenizer, student.tokenizer)
        )
        wrong = next((i for i in sorted(theirs.keys() | ours.keys()) if theirs.get(i) != ours.get(i)), None)
        if wrong is not None:
            raise UserError(
                f"{key}.path: {name} has another vocabulary than the model that trains: id {wrong} is "
                f"{theirs.get(wrong, 'no token')} there and {ours.get(wrong, 'no token')} here. Probabilities of ids "
                "are compared: take a model with the same tokenizer, or of a teacher of sampled text set align: text"
            )
    elif source.folder is not None and sizes[0] != sizes[1]:
        raise UserError(
            f"{key}.path: {name} has {sizes[0]} ids and the student {sizes[1]}, and one of the two has no tokenizer "
            "that says what they stand for: take a teacher with the student's vocabulary"
        )
    if config.align == "tokens" and student.tokenizer is not None and student.tokenizer.vocab_size > sizes[0]:
        raise UserError(
            f"{key}: {name} has {sizes[0]} ids, fewer than the {student.tokenizer.vocab_size} of the student's "
            "tokenizer: take a teacher with the student's vocabulary"
        )
    if config.mesh is not None:
        require(build_mesh(config.mesh, divided(config)[1]), Demand(source.decoder), f"{key}.mesh")
    return source


def read_by_teachers(recipe: Sections, sources: List[Source | None], inputs: Inputs) -> tuple[Inputs, tuple[str, ...]]:
    """The inputs with what renders rows for the teachers, where one would not read them as the student does, or rows
    choose among them; and notes.

    Args:
        recipe: of the run.
        sources: the teachers', from `teacher_sources`.
        inputs: the student's.

    Raises:
        UserError: rows are chats and a teacher has no chat template, or ends its turns or the first row's completion
            in other tokens; something that only the student's format is known for is set; teachers that are all
            followed read in different ways; or a row names a teacher that there is not.
    """
    config, data, kind = recipe.teacher, recipe.data, recipe.row_kind
    if config is None:
        return inputs, ()
    if config.is_stored:
        stored = StoredTeacher(inputs.tokenizer and vocabulary(inputs.tokenizer), inputs.source.decoder.vocab_size)
        inputs = replace(inputs, teacher=stored)
        next(inputs.examples(inputs.train, data, kind, taught=True).first())
        return inputs, ()
    each = zip(config.each.items(), sources, strict=True)
    read = [_reader(key, teacher, source, recipe, inputs) for (key, teacher), source in each]
    readers, notes = [reader for reader, _ in read], tuple(note for _, notes in read for note in notes)
    if config.column is not None:
        what = "rollout.environment" if recipe.plays else "data.packing" if data.cuts else "data.pictures"
        if recipe.plays or data.cuts or data.pictures:
            raise UserError(f"teacher.column: a row's own teacher reads whole texts of the row, without {what}")
        # As long as the student's, whose prompts may be cut to less than the sequence has room for.
        whole = data.longest_prompt + data.longest_completion if kind == RowKind.PROMPT else data.max_length
        same = TeacherReader(inputs.tokenizer, whole, "the student")
        table = {name: reader or same for name, reader in zip(config.by_name, readers, strict=True)}
        chosen = TeacherChoice(config.column, table)
        for rows in filter(None, (inputs.train, inputs.held_out)):
            for i in range(len(rows)):
                chosen.of(rows[i], data.columns, f"row {i + 1} of {rows.name}")
    else:
        chosen, names = readers[0], list(config.by_name)
        if other := next((i for i, x in enumerate(readers) if _as_read(x) != _as_read(chosen)), None):
            raise UserError(
                f"teacher.by_name: {names[0]} and {names[other]} read the rows in different ways, and both are "
                "followed: have them read the student's format (chat_template: student), or name one of them in a "
                "column of the row (teacher.column)"
            )
    if chosen is None:
        return inputs, notes
    inputs = replace(inputs, teacher=chosen)
    shows = isinstance(recipe.algorithm, DistillConfig) and recipe.algorithm.success is not None
    first = inputs.examples(inputs.train, data, kind, taught=True).example(0, dict.fromkeys(SHOWN, "") if shows else {})
    if isinstance(first, Dropped) and first.reason == NOT_THE_TEACHERS:
        raise UserError(f"teacher.path: row 1 of {inputs.train.name}: {first.detail}")
    return inputs, notes


def _as_read(reader: TeacherReader | None) -> tuple[object, ...] | None:
    """What decides how a teacher reads a row; None where that is as the student does."""
    if reader is None or reader.tokenizer is None:
        return None
    return reader.prompt, reader.length, vocabulary(reader.tokenizer), *_format(reader.tokenizer)


def _reader(
    key: str, config: OneTeacher, source: Source | None, recipe: Sections, inputs: Inputs
) -> tuple[TeacherReader | None, list[str]]:
    """What renders rows for a teacher, None where it reads them as the student does; and notes."""
    data, notes = recipe.data, list[str]()
    ours, theirs = inputs.tokenizer, None if source is None else source.tokenizer
    examples, name = inputs.examples(inputs.train, data, recipe.row_kind), config.path or "the random teacher"
    are_chats = recipe.plays or any(part.settings.chat for part in examples.parts or [examples])
    if config.prompt and ours is None:
        raise UserError(f"{key}.prompt: changes nothing where rows are token ids: leave it out")
    by_text = config.align == "text"
    if by_text and config.chat_template == "student":
        raise UserError(f"{key}.chat_template: the student's format is of its tokens, and {name} has others: name one")
    if by_text:
        reader = theirs
        if theirs is not None and config.chat_template is not None:
            reader = with_template(theirs, config.chat_template, f"{key}.chat_template")
    elif ours is None or not are_chats or config.path is None or config.is_policy:
        if config.chat_template:
            raise UserError(f"{key}.chat_template: changes nothing where no chats are rendered for it: leave it out")
        reader = ours
    elif config.is_served and config.chat_template in (None, "student"):
        reader = ours
        if config.chat_template is None:
            notes.append(
                f"{key}.path: {name} reads the student's chat format, as a server does not tell its own: name it in "
                f"{key}.chat_template where it is another, or say student"
            )
    elif config.chat_template in (None, "student"):
        reader = theirs
    else:
        reader = with_template(ours if theirs is None else theirs, config.chat_template, f"{key}.chat_template")
    same = not by_text and (reader is ours or bool(reader and ours and _format(reader) == _format(ours)))
    if config.chat_template == "student" and not same:
        notes.append(
            f"{key}.chat_template: {name} reads the student's chat format, not that of its folder, so that its "
            "log-probs are biased: leave it out, and it reads the same messages in that one"
        )
        same = True
    if same and config.prompt is None:
        if config.max_length:
            raise UserError(f"{key}.max_length: changes nothing, as {name} reads what the student does: leave it out")
        return None, notes
    remedy = f"have it read the student's format, {key}.chat_template: student"
    remedy = "take a teacher with the student's vocabulary" if by_text else remedy
    if are_chats and not same and (reader is None or reader.chat_template is None):
        raise UserError(
            f"{key}.path: {name} has no chat template, and the rows are chats: name it in {key}.chat_template, as "
            f"data.chat_template does for the student; or {remedy}"
        )
    reader = ours if same else reader
    assert reader is not None, "token ids are read as they are"
    assert ours is not None
    if recipe.plays or data.cuts:
        what = "rollout.environment: makes prompts" if recipe.plays else f"data.packing: {data.packing} makes pieces"
        other = f"leave {key}.prompt out" if same else remedy
        raise UserError(f"{what} for the student alone, and {name} reads others: leave it out, or {other}")
    ends = [turn_end(x) for x in (reader, ours)]
    if not by_text and ends[0] != ends[1]:
        shown = ["no token" if end is None else repr(ours.decode([end])) for end in ends]
        raise UserError(
            f"{key}.path: a turn ends with {shown[0]} in the chat template of {name} and with {shown[1]} in the "
            f"student's, so that completions are not the same tokens: give the student the teacher's format "
            f"(data.chat_template), or {remedy}"
        )
    length = config.max_length or data.max_length * (2 if config.prompt or by_text else 1)
    if length <= data.longest_completion and recipe.algorithm.reads == RowKind.PROMPT:
        raise UserError(
            f"{key}.max_length: {length} leaves no room for a prompt beside a completion of {data.longest_completion}"
        )
    if by_text:
        notes.append(f"{name} has another vocabulary: it and the student are compared by spans of text")
    elif not same:
        notes.append(f"{name} reads the rows in its own chat format")
    return TeacherReader(reader, length, name, config.prompt), notes


def _format(tokenizer: Tokenizer) -> tuple[object, ...]:
    """What decides how a tokenizer of a given vocabulary renders chats."""
    return tokenizer.hf.chat_template, tokenizer.hf.bos_token, tokenizer.hf.eos_token, tokenizer.adds_bos


CONCURRENCY, DEADLINE = 32, 120.0
"""Sequences that a server scores at a time, and seconds in which each has to be scored, further attempts included."""


def endpoint_of(key: str, config: OneTeacher) -> Endpoint:
    """The server of a teacher, whose section is called `key`.

    Raises:
        UserError: it cannot be asked.
    """
    return Endpoint(
        str(config.path).rstrip("/"),
        key,
        key="path",
        served=config.served,
        key_variable=config.key_variable,
        deadline=DEADLINE,
        concurrency=CONCURRENCY,
    )


def check_tokens_of(key: str, endpoint: Endpoint, student: Source) -> None:
    """Compares how a teacher's server and the student write a text in tokens.

    Raises:
        UserError: they have other tokens, or the server does not repeat a prompt with its log-probs.
    """
    where = f"{key}.path: {endpoint.url}"
    asked = {"prompt": TEXT, "return_tokens_as_token_ids": True}
    (answer,) = endpoint.begin("/completions", [{**SCORED, **asked, "model": endpoint.served}]).result()
    listed = answer["choices"][0].get("logprobs") if isinstance(answer, dict) and answer.get("choices") else None
    names = (listed or {}).get("tokens") or []
    if len(names) < 2:
        why = answer if isinstance(answer, Failure) else "it repeats no prompt with its log-probs (echo)"
        raise UserError(f"{where} cannot score tokens: {why}")
    if student.tokenizer is None or not all(str(name).startswith(ID) for name in names):
        return
    theirs, ours = [int(name.removeprefix(ID)) for name in names[:-1]], student.tokenizer.encode(TEXT)
    if theirs[-len(ours) :] != ours:
        raise UserError(
            f"{where} has other tokens: {TEXT!r} has the ids {theirs} there and {ours} here: take a teacher with the "
            "student's vocabulary"
        )


class ServedTeacher:
    """A teacher on a server: log-probs of given tokens, at temperature 1, of what each sequence reads for it."""

    def __init__(self, endpoint: Endpoint):
        """Asks nothing yet."""
        self.endpoint = endpoint

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """As `FrozenModel.logprobs`; returns before the server has answered.

        Raises:
            UserError: where an array is read, that the server did not score it.
        """
        assert temperature == 1, "the recipe was checked"
        views = [sequence.teacher for sequence in sequences if sequence.teacher is not None]
        read = [[x.tokens] for x in views] or [np.split(x.tokens, x.restarts) for x in sequences]
        asked = {**SCORED, "model": self.endpoint.served}
        bodies = [{**asked, "prompt": tokens.tolist()} for parts in read for tokens in parts]
        answers, first = self.endpoint.begin("/completions", bodies), np.cumsum([0, *map(len, read)]).tolist()

        def scored(answer: Any, length: int) -> np.ndarray:
            try:
                values = [0.0, *answer["choices"][0]["logprobs"]["token_logprobs"][1:length]]
                scores = np.asarray(values, np.float32)
            except (KeyError, IndexError, TypeError, ValueError):
                scores = np.zeros(0, np.float32)
            if len(scores) != length or not np.isfinite(scores).all():
                raise UserError(
                    f"teacher.path: {self.endpoint.url} did not score {length} tokens: {answer!s:.200}. What was "
                    "trained before is saved: start it again, and run the same command"
                )
            return scores

        def joined(index: int) -> np.ndarray:
            parts = zip(answers.result()[first[index] : first[index + 1]], read[index], strict=True)
            return np.concatenate([scored(answer, len(tokens)) for answer, tokens in parts])

        scores = Later(len(read), joined)
        return at_the_students(scores, views) if views else scores


SCORED = {"max_tokens": 1, "temperature": 1, "echo": True, "logprobs": 1}
"""Asks for the log-probs of a prompt's tokens. One token is sampled, which some servers want."""


def build_teachers(
    recipe: Sections, sources: List[Source | None], student: Source, learner: Learner
) -> Teacher | ServedTeacher | Teachers | None:
    """Loads the teachers onto their mesh; a frozen base that one shares with the student is not loaded twice.

    `sources` are from `teacher_sources`, `student` is the source of the weights of `learner`.
    """
    assert recipe.teacher is not None
    if recipe.teacher.is_stored:
        return None
    each = zip(recipe.teacher.each.items(), sources, strict=True)
    built = [_built(key, config, recipe, source, student, learner) for (key, config), source in each]
    return Teachers(tuple(built), recipe.teacher.shares) if recipe.teacher.by_name else built[0]


def _built(
    key: str, config: OneTeacher, recipe: Sections, source: Source | None, student: Source, learner: Learner
) -> Teacher | ServedTeacher:
    spec, students, frozen = learner.spec, learner.spec.mesh, learner.frozen
    if config.is_served:
        return ServedTeacher(endpoint_of(key, config))
    assert source is not None
    by_text = config.align == "text"
    read = config.max_length or (2 * recipe.data.max_length if config.prompt or by_text else 0)
    mesh, length = students, max(spec.length, read)
    if config.mesh is not None:
        mesh = build_mesh(config.mesh, divided(config)[1])
    size, packing = recipe.sequences_per_update, bool(recipe.data.packing)
    microbatcher = Microbatcher(rows_per_microbatch(mesh, size, recipe.micro_batch_size, length, packing), mesh)
    if config.is_policy:
        return Teacher(spec.model, microbatcher, length, {}, students, lambda: learner.params)
    trained = spec.model
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
            settings, adapter_params = beside(model, params, students, source.merged)
            model, params = replace(model, adapt=adapt(settings, model.config)), {**params, **adapter_params}
    else:
        model, params = loaded(source, config.dtype, mesh)
    if not by_text:
        return Teacher(model, microbatcher, length, params, students)
    ours, theirs = student.tokenizer, source.tokenizer
    assert ours is not None, "the recipe was checked"
    assert theirs is not None, "the recipe was checked"
    end = turn_end(theirs)
    spans = partial(Spans.of, student=ours, teacher=theirs, end=theirs.eos_id if end is None else end)
    return TextTeacher(model, microbatcher, length, params, students, spans=spans)
