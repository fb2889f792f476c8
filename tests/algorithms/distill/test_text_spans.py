"""A teacher of another vocabulary: completions in two vocabularies, cut into spans of text, and what these give."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.algorithms.distill.test_distill import TEACHER, taught
from tests.run.test_distill_run import OWN, recipe, stepped
from tests.tiny_runs import model_folder, train
from tests.trainers import trainer
from tunix.algorithms.episodes import by_spans
from tunix.cli import main
from tunix.data.teacher import Spans
from tunix.data.tokenizer import Tokenizer
from tunix.trainer.frozen_model import Teacher, TextTeacher
from tunix.types import IN_A_LATER_TOKEN, Sequence, TeacherView

LATER = IN_A_LATER_TOKEN


def merging(*words: str) -> Tokenizer:
    """A byte-level BPE of all bytes, and of these words, each merged letter by letter from its left."""
    vocab = {"</s>": 0} | {letter: i + 1 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = list[tuple[str, str]]()
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


STUDENT, OTHER = merging("un", "believ", "able"), merging("believable", "xy")


def spans(text: str, stops: bool = True) -> Spans:
    ids = STUDENT.encode(text) + [STUDENT.eos_id] * stops
    return Spans.of(np.array(ids, np.int32), STUDENT, OTHER, OTHER.eos_id)


def test_spans_are_cut_where_both_begin_a_token():
    """`un|believ|able|<end>` and `u|n|believable|</s>`: both begin a token at 0 and at 2, and the ends are alike."""
    both = spans("unbelievable")
    assert both.ours.tolist() == [0, 1, 1, 2]
    assert both.theirs.tolist() == [0, 0, 1, 2]
    assert OTHER.decode(both.tokens) == "unbelievable</s>"
    assert spans("un", stops=False).ours.tolist() == [0]  # cut off at the limit: no end
    assert spans("").ours.tolist() == spans("").theirs.tolist()


def test_a_character_of_several_tokens_is_whole():
    """The two bytes of `é` are tokens of each vocabulary, neither of which begins a character of text alone."""
    both = spans("aé!")
    assert both.ours.tolist() == [0, 1, 1, 2, 3]
    assert both.theirs.tolist() == [0, 1, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 262), max_size=24), st.booleans())
@example([95, 95, 95, 127, 95], False)  # bytes of no character, then one of two bytes
@example([95, 95, 95, 95, 95, 1], False)
def test_spans_hold_the_same_text_in_order(ids: list[int], stops: bool):
    """Whatever is sampled, bytes of no character too: each span has tokens of both, and those of the teacher write what
    the student's write."""
    ids = [i for i in ids if i < STUDENT.vocab_size]
    both = Spans.of(np.array([*ids, *[STUDENT.eos_id] * stops], np.int32), STUDENT, OTHER, OTHER.eos_id)
    assert OTHER.decode(both.tokens, skip_special=True) == STUDENT.decode(ids)
    if len(both.tokens):
        for places in (both.ours, both.theirs):
            assert sorted({*places.tolist()}) == list(range(int(both.theirs.max()) + 1))
            assert (np.diff(places) >= 0).all()
    for span in range(int(both.theirs.max(initial=-1)) + 1):
        text = STUDENT.decode(np.array(ids)[both.ours[: len(ids)] == span])
        assert "\ufffd" in text or text == OTHER.decode(both.tokens[both.theirs == span], skip_special=True)


def test_each_token_has_the_gap_of_its_span():
    """log p is -1, -2, -3, -4, log q is -2 of the first, -4 of the next two together: gaps -1 and -4 + 5 = 1; what
    follows the last span has none."""
    teacher, sampler = np.array([0, -2, LATER, -4, LATER], np.float32), np.array([0, -1, -2, -3, -4], np.float32)
    np.testing.assert_allclose(by_spans(teacher, sampler), [0, -2, -1, -2, -4])
    np.testing.assert_array_equal(by_spans(np.array([0, -2, -9], np.float32), sampler[:3]), [0, -2, -9])


def asked(length: int, align: Any, prompt: int = 3) -> tuple[TextTeacher, list[Sequence]]:
    """A random teacher, and completions of a student that it reads after a prompt of its own."""
    client = taught(trainer(length=32), replace(TEACHER, vocab_size=320))
    other = client.learner.teacher
    assert isinstance(other, Teacher)
    settings = {x: getattr(other, x) for x in ("model", "params", "microbatcher", "students")}
    teacher, rows = TextTeacher(**settings, length=length, spans=align), list[Sequence]()
    for text in ("unbelievable", "xy is able", "é"):
        ids = np.array([*STUDENT.encode(text), STUDENT.eos_id], np.int32)
        tokens, mask = np.concatenate([np.array([5, 6], np.int32), ids]), np.arange(len(ids) + 2) > 1
        theirs = np.arange(7, 7 + prompt, dtype=np.int32)
        places = np.where(mask, np.arange(len(tokens)) + prompt - 2, 0).astype(np.int32)
        rows.append(Sequence(tokens, mask, teacher=TeacherView(np.concatenate([theirs, ids]), places)))
    return teacher, rows


def alone(teacher: TextTeacher, tokens: np.ndarray) -> np.ndarray:
    """`[T]` log-probs of a sequence by all logits."""
    read = jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), jnp.int32)
    states = teacher.model.forward(teacher.params, *read)[0]
    logs = jax.nn.log_softmax(teacher.model.logits(teacher.params, states)[0])
    return np.append(0, np.asarray(logs)[np.arange(len(tokens) - 1), tokens[1:]])


@pytest.mark.parametrize("length", [32, 8])
def test_a_span_has_the_log_prob_of_its_text(length: int):
    """Of the teacher's tokens after its own prompt, from all logits; those that its length cuts are left out."""
    teacher, rows = asked(length, partial(Spans.of, student=STUDENT, teacher=OTHER, end=OTHER.eos_id))
    for row, values in zip(rows, teacher.logprobs(rows), strict=True):
        both = teacher.spans(row.tokens[2:])
        scores = alone(teacher, np.concatenate([np.arange(7, 10, dtype=np.int32), both.tokens]))[3:]
        assert values[:2].tolist() == [0, 0]
        for i, span in enumerate(both.ours):
            last = i + 1 == len(both.ours) or both.ours[i + 1] > span
            inside = np.flatnonzero(both.theirs == span)
            if last and inside[-1] + 3 < length:
                assert values[2 + i] == pytest.approx(scores[inside].sum(), abs=1e-5)
            else:
                assert values[2 + i] == LATER


def test_with_the_same_tokens_it_is_compared_token_by_token():
    """A teacher of the student's own vocabulary, aligned by text, says what one that is aligned by tokens says."""
    teacher, rows = asked(32, partial(Spans.of, student=STUDENT, teacher=STUDENT, end=STUDENT.eos_id))
    rows = rows[:2]  # the third's character is two tokens, one span
    for row, by_text, by_token in zip(rows, teacher.logprobs(rows), Teacher.logprobs(teacher, rows), strict=True):
        sampler = np.where(row.loss_mask, np.float32(-1), np.float32(0))
        np.testing.assert_allclose(by_spans(by_text, sampler), by_token, atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A teacher with a vocabulary of its own."""
    path = model_folder(tmp_path / "teacher", tokenizer=False, hidden_size=48, vocab_size=320)
    other = merging("the", "xy")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant: "
    other.replace_template(template).save(path)
    return path


def test_what_it_cannot_do_is_refused(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    def error(**changes: Any) -> str:
        assert main(["check" if changes.pop("check", True) else "run", recipe(tmp_path, OWN, **changes)]) == 2
        return capsys.readouterr().err

    by_text = {"path": "teacher", "dtype": "float32", "align": "text"}
    assert "of a teacher of sampled text set align: text" in error(check=False)
    whole = {"name": "distill", "on_policy": True, "divergence": "reverse_kl"}
    assert "a teacher with another vocabulary tells log-probs of what was sampled" in error(
        teacher=by_text, algorithm=whole
    )
    assert "rollout.top_k: a teacher with another vocabulary" in error(teacher=by_text, rollout={"top_k": 4})
    assert "align: text is for a teacher with a tokenizer" in error(
        teacher={**by_text, "path": "policy", "dtype": "bfloat16", "prompt": "{prompt}!"}
    )
    assert "teacher.chat_template: the student's format is of its tokens" in error(
        teacher={**by_text, "chat_template": "student"}, check=False
    )
    for file in folder.glob("*tok*"):
        file.unlink()
    assert "teacher.align: text is what tokenizers write" in error(teacher=by_text, check=False)


@pytest.mark.slow
def test_a_student_follows_it(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    """Twelve steps nearer to a teacher whose tokens are others, and nothing compiles after the first."""
    by_text = {"path": "teacher", "dtype": "float32", "align": "text"}
    words = recipe(tmp_path, OWN, teacher=by_text, steps=12, batch_size=8)
    train(words, "optimizer.learning_rate=0.01")
    assert "compared by spans of text" in capsys.readouterr().err
    rows = stepped()
    assert all(row["mismatch/max"] < 1e-3 and row["compile/count"] == 0 for row in rows[1:])
    first, last = (np.mean([row["distill/divergence"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last < 0.9 * first
