"""A teacher beside the trainer: the same numbers as all logits give, wherever it sits; and a student that learns."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.trainer.test_step import assert_close, gradients
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.distill.algorithm import Distill
from tunix.algorithms.distill.config import DistillConfig, TeacherMesh
from tunix.algorithms.on_policy import Experience
from tunix.config import DType, MeshConfig, RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import Rows
from tunix.data.types import Prompt
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.config import DecoderConfig
from tunix.models.model import Model, Params
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.types import sequence_of
from tunix.trainer.frozen_model import Teacher
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.perf import Compilations
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Completion, Sampling, Sequence, TeacherView

# Wider than the student, with a soft cap, and its table is padded to more ids than the tokens use.
TEACHER = replace(RICH, d_model=48, vocab_size=104)
SAMPLING = Sampling(max_tokens=12)
GIVEN = Distill(DistillConfig()).objective


def taught(
    student: Trainer,
    config: DecoderConfig = TEACHER,
    *,
    mesh: TeacherMesh | None = None,
    rows: int = 4,
    dtype: DType = "float32",
    seed: int = 7,
) -> Trainer:
    """The student with a random teacher: on its mesh, or on one of the last devices."""
    home = student.learner.spec.mesh if mesh is None else build_mesh(mesh, jax.devices()[-mesh.size :])
    model = Model(config, dtype=dtype)
    params = model.init(jax.random.key(seed), dict.fromkeys(model.shapes, dtype), home)
    student.learner.teacher = Teacher(
        model, Microbatcher(rows, home), student.learner.spec.length, params, student.learner.spec.mesh
    )
    return student


def dense_kl(client: Trainer, params: Params, batch: Batch) -> jax.Array:
    """`KL(teacher || student)`, the mean over trained tokens, from all logits of the batch."""
    assert client.learner.teacher is not None
    read = tuple(map(jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids)))

    def log_softmax(model: Model, params: Params) -> jax.Array:
        return jax.nn.log_softmax(model.logits(params, model.forward(params, *read)[0])[:, :-1, :96])

    log_p, log_q = (
        log_softmax(client.learner.spec.model, params),
        log_softmax(client.learner.teacher.model, client.learner.teacher.params),
    )
    kl = (jnp.exp(log_q) * (log_q - log_p)).sum(-1)
    weights = jnp.where(batch.loss_mask, batch.weights[batch.sequence_ids], 0.0)[:, 1:]
    return (kl * weights).sum() / weights.sum()


@pytest.mark.parametrize("config", [*slow([PLAIN]), RICH], ids=["plain", "rich"])
def test_a_step_has_the_loss_and_the_gradients_of_all_logits(config):
    batch = pack(sequences(4), 4, 24, packing=True)
    client = taught(trainer(config))
    value, wanted = jax.jit(jax.value_and_grad(lambda params: dense_kl(client, params, batch)))(client.learner.params)
    found = gradients(client, batch, GIVEN)
    assert found[0] == pytest.approx(float(value), rel=1e-5)
    assert_close(found[1], jax.device_get(wanted))


@pytest.mark.slow  # the same of other losses stays, in tests/trainer/test_step.py
def test_packing_passes_and_the_teachers_own_passes_do_not_change_anything():
    loss = Distill(DistillConfig(divergence="jsd", top_k=9, sft_weight=0.2)).objective
    rows = sequences(9)
    whole = gradients(taught(trainer(rows=9), rows=9), pack(rows, 9, 24, packing=False), loss)
    for mine, teachers, packing in ((2, 3, True), (4, 1, False)):
        client = taught(trainer(rows=mine), rows=teachers)
        value, found = gradients(client, pack(rows, 9, 24, packing), loss)
        assert value == pytest.approx(whole[0], rel=1e-5)
        assert_close(found, whole[1])


@pytest.mark.slow  # loss and gradients beside all logits stay
def test_a_teacher_that_is_the_student_has_nothing_to_teach():
    student = trainer(RICH)
    student.learner.teacher = Teacher(
        student.learner.spec.model,
        student.learner.spec.microbatcher,
        24,
        student.learner.params,
        student.learner.spec.mesh,
    )
    batch = pack(sequences(5), 5, 24, packing=True)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        value, found = gradients(student, batch, Distill(DistillConfig(divergence=kind)).objective)
        assert value == pytest.approx(0, abs=1e-6)
        assert max(np.abs(x).max() for x in found.values()) < 1e-6
    assert student.evaluate([batch], GIVEN)["eval/distill/agreement"] == 1


@pytest.mark.slow
def test_student_and_teacher_on_devices_of_their_own():
    batch = pack(sequences(8), 8, 24, packing=True)
    alone = taught(trainer())
    apart = taught(trainer(devices=4, mesh=MeshConfig(fsdp=2, tensor=2)), mesh=TeacherMesh(fsdp=2, tensor=2), rows=2)
    assert apart.learner.teacher is not None
    assert not set(apart.learner.spec.mesh.devices.flat) & set(apart.learner.teacher.microbatcher.mesh.devices.flat)
    for _ in range(2):
        one, two = alone.step(batch, GIVEN), apart.step(batch, GIVEN)
        assert float(two["train/loss"]) == pytest.approx(float(one["train/loss"]), abs=1e-4)
        assert float(two["train/grad_norm"]) == pytest.approx(float(one["train/grad_norm"]), rel=1e-3)
    rows = sequences(3)
    for one, two in zip(alone.logprobs(rows, "teacher"), apart.logprobs(rows, "teacher"), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_nothing_compiles_after_the_first_step_and_no_checkpoint_holds_the_teacher():
    client = taught(trainer())
    held = client.learner.teacher
    assert held is not None
    client.step(pack(sequences(8, 0), 8, 24, packing=True), GIVEN)
    before, state = jax.device_get(held.params), jax.tree.structure(client.state)
    compilations = Compilations()
    for seed in range(1, 4):
        client.step(pack(sequences(8 - seed, seed), 8, 24, packing=True), GIVEN)
    assert compilations.since_warmup == 0
    assert state == jax.tree.structure(trainer().state)
    for name, x in held.params.items():
        np.testing.assert_array_equal(x, before[name])


def test_log_probs_of_the_teacher_are_its_own_and_without_one_there_are_none():
    rows, alone = sequences(4), trainer(TEACHER, seed=7)
    for of_teacher, own in zip(
        taught(trainer()).logprobs(rows, "teacher", 0.8), alone.logprobs(rows, temperature=0.8), strict=True
    ):
        np.testing.assert_allclose(of_teacher, own, atol=1e-6)
    with pytest.raises(ValueError, match="no teacher"):
        alone.logprobs(rows, "teacher")
    with pytest.raises(ValueError, match="no teacher"):
        alone.step(pack(rows, 4, 24, packing=True), GIVEN)


@pytest.mark.slow  # adapters and half precision have tests of their own
def test_under_an_adapter_only_it_learns_and_half_precision_is_near():
    batch = pack(sequences(6), 6, 24, packing=True)
    full, half = taught(trainer()), taught(trainer(dtype="bfloat16"), dtype="bfloat16")
    exact = full.evaluate([batch], GIVEN)
    assert half.evaluate([batch], GIVEN)["eval/loss"] == pytest.approx(exact["eval/loss"], rel=3e-2)
    lora = taught(trainer(adapter=AdapterConfig(rank=4)))
    first = lora.step(batch, GIVEN)
    assert float(first["train/loss"]) == pytest.approx(exact["eval/loss"], rel=1e-5)
    found = gradients(lora, batch, GIVEN)[1]
    assert all("_lora_" in name for name in found)
    assert max(np.abs(x).max() for x in found.values()) > 1e-4


@pytest.mark.parametrize("divergence", ["forward_kl", *slow(["reverse_kl", "jsd"])])
def test_a_student_comes_near_its_teacher(divergence):
    """On eight sequences by heart: the divergence falls to less than a fifth, and the likeliest tokens agree."""
    client = taught(trainer())
    loss = Distill(DistillConfig(divergence=divergence)).objective
    batch = pack(sequences(8), 8, 24, packing=True)
    found = [client.step(batch, loss) for _ in range(60)]
    assert float(found[-1]["train/loss"]) < 0.2 * float(found[0]["train/loss"])
    assert float(found[-1]["distill/agreement"]) > float(found[0]["distill/agreement"]) + 0.3


def viewed(number: int, seed: int = 0) -> list[Sequence]:
    """Ragged sequences that the teacher reads after another prompt, with tokens of its own between the trained ones."""
    rng = np.random.default_rng(seed)

    def told(sequence: Sequence) -> Sequence:
        # Before each token up to two others, and before the first one up to ten.
        more = rng.integers(0, 3, len(sequence.tokens))
        more[0] += rng.integers(0, 9)
        at = np.cumsum(more) + np.arange(len(more))
        tokens = rng.integers(0, 96, at[-1] + 1).astype(np.int32)
        tokens[at] = sequence.tokens
        return replace(sequence, teacher=TeacherView(tokens, np.where(sequence.loss_mask, at, 0).astype(np.int32)))

    return [told(sequence) for sequence in sequences(number, seed)]


def alone_kl(client: Trainer, params: Params, rows: list[Sequence]) -> jax.Array:
    """`KL(teacher || student)`, the weighted mean over trained tokens, from all logits of each sequence by itself."""
    assert client.learner.teacher is not None
    teacher, total, count = client.learner.teacher, jnp.float32(0), 0.0

    def log_softmax(model: Model, params: Params, tokens: np.ndarray) -> jax.Array:
        read = jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), jnp.int32)
        return jax.nn.log_softmax(model.logits(params, model.forward(params, *read)[0])[0, :, :96])

    for row in rows:
        assert row.teacher is not None
        trained = np.flatnonzero(row.loss_mask)
        log_p = log_softmax(client.learner.spec.model, params, row.tokens)[trained - 1]
        log_q = log_softmax(teacher.model, teacher.params, row.teacher.tokens)[row.teacher.places[trained] - 1]
        total += row.weight * (jnp.exp(log_q) * (log_q - log_p)).sum()
        count += row.weight * len(trained)
    return total / count


@pytest.mark.parametrize("packing", [True, False])
def test_a_teacher_that_reads_in_another_way_is_compared_token_by_token(packing: bool):
    """Packed in rows of its own, the teacher gives each trained token what it gives to the sequence alone; the value
    and the gradients are those of all logits. Two of five rows to a pass, of the student's and of the teacher's."""
    rows = viewed(5)
    client = taught(trainer(rows=2), rows=2)
    assert client.learner.teacher is not None
    client.learner.teacher = replace(client.learner.teacher, length=72)
    batch = pack(rows, 6, 24, packing)
    wanted = jax.jit(jax.value_and_grad(lambda params: alone_kl(client, params, rows)))(client.learner.params)
    found = gradients(client, batch, GIVEN)
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-5)
    assert_close(found[1], jax.device_get(wanted[1]))
    unread = gradients(client, replace(batch, teacher=None), GIVEN)
    assert abs(unread[0] - found[0]) > 1e-2  # the student's own rows are another text


def test_the_teachers_log_probs_of_what_it_reads_come_to_the_students_tokens():
    rows = viewed(4)
    client = taught(trainer())
    teacher = client.learner.teacher
    assert teacher is not None
    client.learner.teacher = replace(teacher, length=72)
    plain = trainer(TEACHER, seed=7, length=72)
    for found, row in zip(client.logprobs(rows, "teacher", 0.8), rows, strict=True):
        assert row.teacher is not None
        view = Sequence(row.teacher.tokens, np.arange(len(row.teacher.tokens)) > 0)
        (alone,) = plain.logprobs([view], temperature=0.8)
        at = np.flatnonzero(row.loss_mask)
        np.testing.assert_allclose(found[at], alone[row.teacher.places[at]], atol=1e-5)
        assert not found[~row.loss_mask].any()
    assert len(client.logprobs(rows, "teacher")[1:3]) == 2


def test_the_teachers_log_probs_are_over_the_ids_that_a_token_was_drawn_from():
    """Of two ids its own and another: their log-probs are those over all ids, renormalised."""
    (row,) = viewed(1)
    assert row.teacher is not None
    other = (row.tokens + 1) % 96
    ids = np.where(row.loss_mask[:, None], np.stack([row.tokens, other], axis=1), -1).astype(np.int32)
    client = taught(trainer())
    assert client.learner.teacher is not None
    client.learner.teacher = replace(client.learner.teacher, length=72)
    (found,) = client.logprobs([replace(row, candidates=ids)], "teacher")
    teacher, tokens, at = client.learner.teacher, row.teacher.tokens, row.teacher.places[row.loss_mask]
    read = jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), jnp.int32)
    logits = teacher.model.logits(teacher.params, teacher.model.forward(teacher.params, *read)[0])[0][at - 1]
    mine, others = (logits[np.arange(len(at)), x[row.loss_mask]] for x in (row.tokens, other))
    np.testing.assert_allclose(found[row.loss_mask], mine - jnp.logaddexp(mine, others), atol=1e-5)


def test_answers_that_share_a_prompt_are_read_one_by_one():
    """The student packs a prompt once for two answers; the teacher reads each after a prompt of its own."""
    rng = np.random.default_rng(1)
    prompt, rows = rng.integers(0, 96, 6).astype(np.int32), list[Sequence]()
    for number in (3, 5, 4, 2):
        answer, before = rng.integers(0, 96, number).astype(np.int32), rng.integers(0, 96, 9).astype(np.int32)
        mask = np.arange(6 + number) >= 6
        view = TeacherView(
            np.concatenate([before, answer]), np.where(mask, np.arange(6 + number) + 3, 0).astype(np.int32)
        )
        rows.append(Sequence(np.concatenate([prompt, answer]), mask, teacher=view))
    client = taught(trainer())
    batch = pack(rows, 4, 24, packing=True, together=2)
    assert batch.parents is not None
    wanted = float(jax.jit(lambda params: alone_kl(client, params, rows))(client.learner.params))
    assert client.evaluate([batch], GIVEN)["eval/loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_sampled_completion_follows_the_teachers_prompt():
    """Three tokens after a prompt of two, which the teacher reads after four; an environment wrote the second."""
    tokens = np.array([7, 8, 9], np.int32)
    zeros = np.zeros(3, np.float32)
    completion = Completion(tokens, zeros, "stop", np.zeros(3, np.int32), SAMPLING, ((0, 1), (2, 3)))
    prompt = Prompt(
        np.array([1, 2], np.int32),
        "",
        {},
        teacher=TeacherView(np.array([3, 4, 5, 6], np.int32), np.zeros(4, np.int32), 1),
    )
    sequence = sequence_of(prompt, completion)
    assert sequence.tokens.tolist() == [1, 2, 7, 8, 9]
    assert sequence.teacher is not None
    assert sequence.teacher.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert sequence.teacher.places.tolist() == [0, 0, 4, 5, 6]
    assert sequence.teacher.number == 1


@pytest.mark.slow
def test_a_teacher_on_devices_of_its_own_reads_there():
    rows = viewed(8)
    batch, alone = pack(rows, 8, 24, packing=True), taught(trainer())
    apart = taught(trainer(devices=4, mesh=MeshConfig(fsdp=2, tensor=2)), mesh=TeacherMesh(fsdp=2, tensor=2), rows=2)
    for client in (alone, apart):
        assert client.learner.teacher is not None
        client.learner.teacher = replace(client.learner.teacher, length=72)
    one, two = alone.evaluate([batch], GIVEN), apart.evaluate([batch], GIVEN)
    assert two["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-5)


@pytest.mark.parametrize("itself", [False, True])
def test_reading_in_another_way_compiles_nothing_after_the_first_step(itself: bool):
    client = teaching_itself(trainer()) if itself else taught(trainer())
    assert client.learner.teacher is not None
    client.learner.teacher = replace(client.learner.teacher, length=72)
    client.step(pack(viewed(8), 8, 24, packing=True), GIVEN)
    compilations = Compilations()
    for seed in range(1, 4):
        client.step(pack(viewed(8 - seed, seed), 8, 24, packing=True), GIVEN)
    assert compilations.since_warmup == 0


def teaching_itself(student: Trainer, length: int = 72) -> Trainer:
    """The student as its own teacher, with its present weights."""
    spec, learner = student.learner.spec, student.learner
    learner.teacher = Teacher(spec.model, spec.microbatcher, length, {}, spec.mesh, lambda: learner.params)
    return student


def test_a_model_that_sees_more_teaches_itself():
    """SDFT (arXiv 2601.19897): `KL(policy(. | x) || policy(. | x, c))` at each token, by the weights of before the
    update, and no gradient through the one that sees c; all logits of each sequence alone give the same."""
    rows = viewed(4)
    client = teaching_itself(trainer(RICH))
    objective = Distill(DistillConfig(preset="sdft")).needs.divergence
    assert objective is not None
    loss = replace(GIVEN, divergence=objective)
    model = client.learner.spec.model

    def log_softmax(params: Params, tokens: np.ndarray) -> jax.Array:
        read = jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), jnp.int32)
        return jax.nn.log_softmax(model.logits(params, model.forward(params, *read)[0])[0])

    def alone(params: Params) -> jax.Array:
        total, count = jnp.float32(0), 0.0
        for row in rows:
            assert row.teacher is not None
            at = np.flatnonzero(row.loss_mask)
            log_p = log_softmax(params, row.tokens)[at - 1]
            log_q = jax.lax.stop_gradient(log_softmax(params, row.teacher.tokens)[row.teacher.places[at] - 1])
            total += row.weight * (jnp.exp(log_p) * (log_p - log_q)).sum()
            count += row.weight * len(at)
        return total / count

    both, batch = jax.jit(jax.value_and_grad(alone)), pack(rows, 4, 24, packing=True)
    wanted = both(client.learner.params)
    found = gradients(client, batch, loss)
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-5)
    assert_close(found[1], jax.device_get(wanted[1]))
    client.step(batch, loss)
    moved = float(both(client.learner.params)[0])
    assert abs(moved - found[0]) > 1e-3
    assert float(client.step(batch, loss)["train/loss"]) == pytest.approx(moved, rel=1e-5)  # the teacher moved, too


@pytest.mark.slow  # the paper's number above is of the same path
def test_without_more_to_see_it_has_nothing_to_teach_itself():
    client, batch = teaching_itself(trainer()), pack(sequences(4), 4, 24, packing=True)
    value, found = gradients(client, batch, Distill(DistillConfig(divergence="jsd")).objective)
    assert value == pytest.approx(0, abs=1e-6)
    assert max(np.abs(x).max() for x in found.values()) < 1e-6


def drawing(steps: int) -> Iterator[RolloutStep]:
    """The steps of an on-policy run on prompts of two tokens, eight a step."""
    rows = Rows("rows", [{"prompt_ids": [i, i + 1]} for i in range(32)])
    examples = Examples(rows, None, DataConfig(train="rows", max_length=16), RowKind.PROMPT)
    stream = Prompts(examples, seed=0, epochs=None)
    like = RolloutStep(
        collector=Collector(None, SAMPLING, None),
        stream=stream,
        size=8,
        seed=0,
        packed=partial(pack, max_length=16),
        tolerance=1e-3,
    )
    with closing(RolloutStream(like)) as made:
        yield from itertools.islice(made, steps)


@pytest.mark.parametrize("divergence", slow(["sampled", "reverse_kl"]))
def test_a_student_that_draws_comes_near_its_teacher(divergence):
    """The reverse KL on what it draws falls by a third at least, and the sampler stays the model that is trained."""
    client = taught(trainer(length=16))
    algorithm = Distill(DistillConfig(on_policy=True, divergence=divergence, group_size=4), SAMPLING)
    done = [algorithm.update(client, data) for data in drawing(30)]
    measured = [float(one.metrics["distill/divergence"]) for one in done]
    assert np.mean(measured[-5:]) < 0.67 * np.mean(measured[:2])  # about 0.53 for both
    assert max(float(one.metrics["mismatch/max"]) for one in done) < 1e-3
    assert all(one.metrics["rollout/length"] == 12 for one in done)
    samples = list(done[0].samples)
    assert {row["group"] for row in samples} == set(range(len(samples) // 4))
    assert "advantage" not in samples[0]


def test_an_update_weighs_what_was_sampled_by_what_came_before_it():
    """IW-OPD's weights of each completion, from the log-probs that the batch holds beside them."""
    client = taught(trainer(length=16))
    algorithm = Distill(DistillConfig(on_policy=True, prefix_weight=0.5, group_size=2), SAMPLING)
    client.publish()
    for data in drawing(1):
        (batch,) = algorithm.prepare(client, Experience(algorithm.gather(client, data), data)).batches
    arrays = {name: np.asarray(x) for name, x in batch.per_token.items()}
    for i in range(16):
        at = (np.asarray(batch.sequence_ids) == i) & (np.asarray(batch.loss_mask) > 0)
        sizes = np.abs(arrays["teacher_logprobs"][at] - arrays["old_logprobs"][at])
        assert len(sizes) == 12
        for t in range(12):
            wanted = 1 + 0.5 * sizes[t:].sum() / sizes.sum()
            assert arrays["prefix_weights"][at][t] == pytest.approx(wanted, rel=1e-5)
