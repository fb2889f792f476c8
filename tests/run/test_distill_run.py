"""Distillation from a recipe: on given text and on the student's own, killed and resumed, with mistakes told early."""

import json
import math
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fake_vllm import FakeVLLM, served
from tests.tiny_runs import RECIPE, lines, metrics, model_folder, train, write_recipe, write_rows
from tunix.algorithms.distill.algorithm import Distill
from tunix.algorithms.distill.config import PROMPTS
from tunix.cli import main
from tunix.config import MeshConfig
from tunix.data.teacher import vocabulary
from tunix.data.templates import TEMPLATES
from tunix.data.tokenizer import bytes_tokenizer
from tunix.hf.source import of_recipe
from tunix.mesh import build_mesh
from tunix.recipe.recipe import Recipe
from tunix.rollout.servers.chat import Endpoint
from tunix.run.client import client_of
from tunix.run.frozen_models import ServedTeacher, teacher_sources
from tunix.run.setup import Setup
from tunix.trainer.trainer import Trainer
from tunix.types import Sequence, TeacherView

TEACHER = {"path": "teacher", "dtype": "float32"}
GIVEN: dict[str, Any] = {"algorithm": {"name": "distill"}, "teacher": TEACHER}
OWN: dict[str, Any] = {
    "algorithm": {"name": "distill", "on_policy": True, "group_size": 2},
    "teacher": TEACHER,
    "data.max_length": 32,
    "data.completion_length": 12,
    "logging.samples.groups": 1,
}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Wider than the student, and its table is padded to more ids."""
    return model_folder(tmp_path / "teacher", hidden_size=48, vocab_size=288)


def recipe(folder: Path, *parts: dict[str, Any], **changes: Any) -> str:
    """A dot in a key is written as two underscores."""
    merged = {key: value for part in parts for key, value in part.items()}
    return str(write_recipe(folder / "r.yaml", {**merged, **{k.replace("__", "."): v for k, v in changes.items()}}))


def stepped(run: str = "run") -> list[dict[str, Any]]:
    return [row for row in metrics(run) if "train/loss" in row]


def measured(run: str = "run") -> list[float]:
    return [row["eval/distill/divergence"] for row in metrics(run) if "eval/distill/divergence" in row]


@pytest.mark.slow
def test_on_given_text_the_student_comes_nearer_on_held_out_rows(tmp_path: Path, teacher: Path, capsys):
    train(recipe(tmp_path, GIVEN, data__eval="held.jsonl", eval__every=10, steps=20))
    found = measured()
    assert len(found) == 3
    assert found[-1] < 0.8 * found[0]
    told = capsys.readouterr().err
    assert f"held-out distance to the teacher {found[0]:.3f} -> {found[-1]:.3f} nats per token" in told
    assert "perplexity" not in told
    assert not list((tmp_path / "run/export").glob("*teacher*"))
    assert all(row["compile/count"] == 0 for row in stepped())


@pytest.mark.slow
def test_on_its_own_text_it_is_measured_on_given_answers_too(tmp_path: Path, teacher: Path):
    train(recipe(tmp_path, OWN, data__eval="held.jsonl", eval__every=2, steps=4, batch_size=4))
    assert len(measured()) == 3
    for row in stepped():
        assert math.isfinite(row["distill/divergence"])
        assert row["mismatch/max"] < 1e-3
        assert row["train/grad_norm"] > 0
        assert 0 < row["rollout/length"] <= 12
        assert row["policy/ratio"] == pytest.approx(1, abs=1e-3)
        assert row["perf/logprobs_seconds"] > 0
    drawn = [row for row in lines(tmp_path / "run/samples.jsonl") if "completion" in row and "group" in row]
    assert len(drawn) == 4 * 2  # steps, answers to the one prompt that is shown


@pytest.mark.slow
def test_a_teacher_on_a_server_tells_what_it_tells_here(tmp_path: Path, teacher: Path):
    few = {"steps": 2, "batch_size": 4, "logging": {"every": 1}}
    train(recipe(tmp_path, OWN, few), "output=here")
    with served(FakeVLLM(teacher, length=128)) as url:
        train(recipe(tmp_path, OWN, few, teacher={"path": f"{url}/v1"}), "output=there")
    for here, there in zip(stepped("here"), stepped("there"), strict=True):
        for name in ("distill/divergence", "distill/teacher_logprob", "train/loss"):
            assert there[name] == pytest.approx(here[name], abs=2e-5)
        assert there["compile/count"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher.path": "http://127.0.0.1:9/v1"}, "teacher.path: http://127.0.0.1:9/v1 cannot be asked"),
        ({"teacher.dtype": "float32"}, "teacher: mesh and dtype are the server's own: leave them out"),
        ({"teacher.served": "big"}, "teacher.served: URL/v1 has no model 'big', but "),
        ({"teacher.key_variable": "NO_SUCH_KEY"}, "teacher.key_variable: NO_SUCH_KEY is not set in the environment"),
        ({"algorithm.divergence": "jsd"}, "divergence: jsd compares whole distributions"),
        ({"algorithm.on_policy": False, "algorithm.group_size": None}, "divergence: forward_kl compares whole distrib"),
        ({"data.eval": "held.jsonl"}, "data.eval: held-out rows are compared by whole distributions"),
        ({"rollout.temperature": 0.7}, "rollout.temperature: a teacher on a server tells log-probs of its whole"),
        ({"rollout.top_k": 5}, "rollout.top_k: a teacher on a server"),
        ({"teacher.path": "teacher", "teacher.served": "big"}, "teacher: served changes nothing without a server"),
    ],
)
def test_what_a_teacher_on_a_server_does_not_tell_is_refused_before_weights(
    tmp_path: Path, teacher: Path, capsys, monkeypatch, changes: dict[str, Any], said: str
):
    monkeypatch.setattr("tunix.run.build.client_of", lambda *_, **__: pytest.fail("weights were read"))
    with served(FakeVLLM(teacher, length=128)) as url:
        words = recipe(tmp_path, OWN, teacher={"path": f"{url}/v1"})
        assert main(["run", words, *(f"{key}={json.dumps(value)}" for key, value in changes.items())]) == 2
        assert said.replace("URL", url) in capsys.readouterr().err


def test_a_server_scores_each_transcript_of_an_episode_by_itself():
    """A stand-in that says -1, -2, ... of a prompt's tokens but the first, and 9 of the token that it samples."""

    class Counting(Endpoint):
        def __init__(self):
            self.url, self.served = "http://127.0.0.1:1/v1", "big"

        def begin(self, path: str, bodies: Any) -> Future[list[Any]]:
            answers: Future[list[Any]] = Future()
            each = [[None, *(-float(i) for i in range(1, len(body["prompt"]))), 9.0] for body in bodies]
            answers.set_result([{"choices": [{"logprobs": {"token_logprobs": values}}]} for values in each])
            return answers

    row = Sequence(np.arange(5, dtype=np.int32), np.arange(5) > 0, restarts=(2,))
    teacher = ServedTeacher(Counting())
    first, second = teacher.logprobs([row, replace(row, restarts=())])
    assert first.tolist() == [0, -1, 0, -1, -2]
    assert second.tolist() == [0, -1, -2, -3, -4]
    (viewed,) = teacher.logprobs([replace(row, teacher=TeacherView(np.arange(3), np.array([0, 0, 0, 1, 2])))])
    assert viewed.tolist() == [0, 0, 0, -1, -2]


def test_a_server_with_other_tokens_is_no_teacher(tmp_path: Path, teacher: Path, capsys):
    other = bytes_tokenizer("llama3")
    other.hf.add_tokens(["naïve"])
    other.save(teacher)
    with served(FakeVLLM(teacher, length=128)) as url:
        assert main(["run", recipe(tmp_path, OWN, teacher={"path": f"{url}/v1"})]) == 2
    assert f"teacher.path: {url}/v1 has other tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_rewards_and_a_teacher_are_followed_together(tmp_path: Path, teacher: Path):
    """Twenty steps with rewards that are all alike: the policy comes nearer to its teacher by the teacher alone."""
    (tmp_path / "alike.py").write_text("def alike(completion):\n    return 1.0\n")
    algorithm = {"name": "grpo", "group_size": 4, "teacher_kl": 1.0, "advantage": "mean"}
    words = recipe(tmp_path, OWN, algorithm=algorithm, reward={"functions": ["alike.py:alike"]}, steps=20)
    train(words, "optimizer.learning_rate=0.01")
    rows = stepped()
    assert all(row["mismatch/max"] < 1e-3 and row["compile/count"] == 0 for row in rows)
    first, last = (sum(row["kl/teacher"] for row in part) / 4 for part in (rows[:4], rows[-4:]))
    assert last < 0.8 * first


@pytest.mark.slow  # tests/run/test_kill.py and tests/run/test_run.py stop others
def test_a_run_that_was_stopped_ends_where_the_other_ends(tmp_path: Path, teacher: Path):
    words = recipe(tmp_path, OWN, steps=4, batch_size=4, checkpoint__every=2)
    train(words, "output=whole")
    train(words, "output=parts", "steps=2")
    train(words, "output=parts")
    whole, parts = stepped("whole"), stepped("parts")
    assert [row["train/loss"] for row in whole] == [row["train/loss"] for row in parts]
    assert [row["distill/divergence"] for row in whole] == [row["distill/divergence"] for row in parts]


@pytest.mark.slow  # tests/algorithms/distill/test_distill.py has both on a mesh without a run around them
def test_a_teacher_on_devices_of_its_own(tmp_path: Path, teacher: Path):
    together = recipe(tmp_path, GIVEN, steps=2, mesh={"fsdp": 8})
    train(together, "output=together")
    train(together, "output=apart", "mesh={fsdp: 4}", "teacher.mesh={fsdp: 2, tensor: 2}")
    for one, two in zip(stepped("together"), stepped("apart"), strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-4)


LAID: dict[str, Any] = {
    "model": {"path": "base", "dtype": "float32"},
    "algorithm": {"name": "distill"},
    "teacher": {"path": "adapter", "dtype": "float32"},
    "adapter": {"rank": 2},
    "steps": 3,
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT folder on the student's own base."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    model_folder(tmp_path / "base")
    torch.manual_seed(0)
    settings = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), settings).save_pretrained("adapter")
    return tmp_path / "adapter"


def built(words: str) -> Trainer:
    """The trainer of a recipe, on one device."""
    recipe = Recipe.load(words)
    source = of_recipe(recipe.model, recipe.data, Path("tokenizer"), None)
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    setup = Setup(recipe, source, Distill(recipe.algorithm), mesh, updates=3)
    return client_of(setup, teachers=teacher_sources(recipe, source))


@pytest.mark.slow
def test_an_adapter_of_the_students_base_teaches_without_a_second_base(tmp_path: Path, adapter: Path):
    words = recipe(tmp_path, LAID)
    shared = built(words)
    assert shared.learner.teacher is not None
    assert all(shared.learner.teacher.params[name] is x for name, x in shared.learner.frozen.items())
    own = set(shared.learner.teacher.params) - set(shared.learner.frozen)
    assert own == {f"layers/{name}/w_lora_{letter}" for name in ("q", "up") for letter in "ab"}
    train(words, "output=shared")
    # The same teacher from another folder is read on its own, with its adapter merged.
    shutil.copytree("base", "elsewhere")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "elsewhere"}))
    train(words, "output=apart")
    for one, two in zip(stepped("shared"), stepped("apart"), strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)
    assert stepped("shared")[0]["train/loss"] > 1e-3  # the student starts at the base, which the teacher is not


@pytest.mark.models
@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": None},  # the base trains
        {"adapter": {"kind": "qlora", "rank": 2, "tile": 16}},  # it is rounded, and the teacher's is not
        {"teacher.dtype": "bfloat16"},
    ],
    ids=["full", "rounded", "dtype"],
)
def test_a_base_that_differs_is_read_for_the_teacher(tmp_path: Path, adapter: Path, changes: dict[str, Any]):
    apart = built(recipe(tmp_path, {**LAID, **changes}))
    assert apart.learner.teacher is not None
    held = {id(x) for x in apart.learner.params.values()}
    assert not any(id(x) in held for x in apart.learner.teacher.params.values())
    assert set(apart.learner.teacher.params) == {
        name for name in apart.learner.teacher.model.shapes if "lora" not in name
    }


# A teacher with a chat template of its own.

HEADED = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role[:1] + ']' + m.content }}"
    "{% if m.role == 'assistant' %}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
CHATS: dict[str, Any] = {"model": {"path": "student", "dtype": "float32"}, "data.train": "chats.jsonl"}


def chat(number: int) -> dict[str, Any]:
    """A row with a question and an answer of several lengths."""
    texts = ("q" * (1 + number % 5), chr(97 + number % 7) * (2 + number % 4))
    return {"messages": [{"role": x, "content": y} for x, y in zip(("user", "assistant"), texts, strict=True)]}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Rows of messages, a student with Llama's format, and a teacher that was trained on another."""
    write_rows(tmp_path / "chats.jsonl", map(chat, range(32)))
    write_rows(tmp_path / "asked.jsonl", map(chat, range(32, 38)))
    model_folder(tmp_path / "student", seed=1)
    model_folder(tmp_path / "teacher", hidden_size=48, vocab_size=288)
    bytes_tokenizer("llama3").replace_template(HEADED).save(tmp_path / "teacher")
    return tmp_path


def log_softmax(folder: str, ids: list[int]) -> torch.Tensor:
    """By transformers, of the ids that both models have, the distribution after each token."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits
    return logits[0, :, :272].log_softmax(-1)


def distance(template: str) -> float:
    """`KL(teacher || student)`, the mean over the tokens of all answers that are held out, by transformers: the
    teacher reads them in a template, of which the answer with its end is the last part."""
    sums, count = 0.0, 0
    ours, theirs = bytes_tokenizer("llama3"), bytes_tokenizer("llama3").replace_template(template)
    for number in range(32, 38):
        messages = chat(number)["messages"]
        ids = [x.hf.apply_chat_template(messages, return_dict=False) for x in (ours, theirs)]
        tail = len(messages[1]["content"]) + 1
        assert ids[0][-tail:] == ids[1][-tail:]
        log_p, log_q = (log_softmax(x, i)[-tail - 1 : -1] for x, i in zip(("student", "teacher"), ids, strict=True))
        sums, count = sums + float((log_q.exp() * (log_q - log_p)).sum()), count + tail
    return sums / count


@pytest.mark.slow
def test_a_teacher_reads_messages_in_its_own_format_unless_it_is_told_to_read_the_students(chats: Path, capsys):
    evaluated = {"data.eval": "asked.jsonl", "eval.every": 2, "steps": 2}
    words = recipe(chats, {**CHATS, **GIVEN, **evaluated})
    train(words)
    assert "teacher reads the rows in its own chat format" in capsys.readouterr().err
    own, students = distance(HEADED), distance(TEMPLATES["llama3"])
    assert measured()[0] == pytest.approx(own, abs=1e-5)
    assert stepped()[1]["compile/count"] == 0
    train(words, "teacher.chat_template=student", "output=students")
    assert "teacher reads the student's chat format, not that of its folder" in capsys.readouterr().err
    assert measured("students")[0] == pytest.approx(students, abs=1e-5)
    assert abs(own - students) > 0.01  # what the wrong format costs
    train(words, "teacher.chat_template=llama3", "output=named")
    assert measured("named") == measured("students")


@pytest.mark.slow  # tests/rollout/test_types.py and tests/algorithms/distill have its parts
def test_on_its_own_text_the_student_is_read_in_the_teachers_format_and_a_kill_changes_nothing(chats: Path):
    words = recipe(chats, {**CHATS, **OWN, "data.max_length": 80}, steps=4, batch_size=4, checkpoint__every=2)
    train(words, "output=whole")
    train(words, "output=parts", "steps=2")
    train(words, "output=parts")
    whole, parts = stepped("whole"), stepped("parts")
    for name in ("train/loss", "distill/divergence", "distill/teacher_logprob"):
        assert [row[name] for row in whole] == [row[name] for row in parts]
    students = recipe(chats, {**CHATS, **OWN, "data.max_length": 80, "teacher.chat_template": "student"}, steps=1)
    train(students, "output=students", "batch_size=4")
    assert stepped("students")[0]["distill/divergence"] != pytest.approx(whole[0]["distill/divergence"], abs=1e-3)
    assert stepped("students")[0]["rollout/length"] == whole[0]["rollout/length"]  # the same answers


def test_a_preset_names_the_teacher_and_what_it_sees(chats: Path):
    """The model itself: with its present weights (SDFT), or those that the run starts from (OPSD)."""
    small = {"data.max_length": 80, "data.completion_length": 12, "model": CHATS["model"], "data.train": "chats.jsonl"}
    made = Recipe.load(recipe(chats, small, algorithm={"name": "distill", "preset": "sdft"}))
    assert (made.algorithm.on_policy, made.algorithm.divergence) == (True, "reverse_kl")
    assert made.teacher is not None
    assert (made.teacher.path, made.teacher.prompt) == ("policy", PROMPTS["sdft"])
    assert Recipe.model_validate(made.model_dump(by_alias=True)) == made  # what a run folder keeps
    made = Recipe.load(recipe(chats, small, algorithm={"name": "distill", "preset": "opsd", "beta": 0.3}))
    assert (made.algorithm.on_policy, made.algorithm.divergence, made.algorithm.beta) == (True, "jsd", 0.3)
    assert made.teacher is not None
    assert (made.teacher.path, made.teacher.prompt) == ("student", PROMPTS["opsd"])
    mine = {"teacher": {"path": "teacher", "prompt": "{prompt}?"}}
    made = Recipe.load(recipe(chats, small, mine, algorithm={"name": "distill", "preset": "sdft"}))
    assert made.teacher is not None
    assert (made.teacher.path, made.teacher.prompt) == ("teacher", "{prompt}?")


@pytest.mark.slow
def test_a_run_that_teaches_itself_ends_where_it_ends_when_it_is_stopped(chats: Path):
    shorter = {"teacher": {"path": "policy", "prompt": "{prompt} ({completion})"}, "logging.samples.groups": 1}
    small = {**shorter, "data.max_length": 80, "data.completion_length": 12, "model": CHATS["model"]}
    changes = {"steps": 3, "batch_size": 4, "checkpoint.every": 1, "data.train": "chats.jsonl"}
    words = recipe(chats, small, changes, algorithm={"name": "distill", "preset": "sdft"})
    train(words, "output=whole")
    train(words, "output=parts", "steps=1")
    train(words, "output=parts")
    for name in ("train/loss", "distill/divergence", "distill/teacher_logprob"):
        assert [row[name] for row in stepped("whole")] == [row[name] for row in stepped("parts")]
    assert all(row["distill/divergence"] > 1e-4 for row in stepped("whole"))


SHOWING = (
    "def long(completions, log_extra):\n"
    "    scores = [float(len(x) > 9) for x in completions]\n"
    "    log_extra('feedback', ['' if x else 'longer!' for x in scores])\n"
    "    return scores\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_a_policy_that_sees_attempts_and_feedback_ends_where_it_ends_when_it_is_stopped(chats: Path, divergence: str):
    """Rewards that tell of a text whether it has ten characters, and to the others that it should have."""
    (chats / "showing.py").write_text(SHOWING)
    small = {"data.max_length": 160, "data.completion_length": 12, "model": CHATS["model"], "data.train": "chats.jsonl"}
    changes = {
        "steps": 3,
        "batch_size": 4,
        "checkpoint.every": 1,
        "reward": {"functions": [{"name": "showing.py:long", "style": "trl"}]},
    }
    algorithm = {"name": "distill", "preset": "sdpo", "group_size": 2, "divergence": divergence}
    words = recipe(chats, small, changes, algorithm=algorithm, teacher={"max_length": 480})
    train(words, "output=whole")
    train(words, "output=parts", "steps=1")
    train(words, "output=parts")
    whole = stepped("whole")
    for name in ("train/loss", "distill/divergence", "distill/taught", "reward/mean"):
        assert [row[name] for row in whole] == [row[name] for row in stepped("parts")]
    assert all(row["compile/count"] == 0 for row in whole[1:])
    assert all(row["mismatch/max"] < 1e-3 and row["distill/taught"] > 0.4 for row in whole)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"path": "policy"}, "teacher: path: policy has nothing to teach itself without more in its prompt"),
        ({"path": "policy", "prompt": "{completion}"}, "teacher: prompt leaves the question out"),
        ({"path": "policy", "prompt": "{prompt}", "dtype": "float32"}, "teacher: mesh, dtype and chat_template are"),
        ({"path": "policy", "prompt": "{prompt} {answer}"}, "row 1 of chats.jsonl: there is no column 'answer'"),
        ({"path": "policy", "prompt": "{prompt}", "max_length": 8}, "teacher.max_length: 8 leaves no room for a promp"),
        ({"path": "student", "max_length": 99}, "teacher.max_length: changes nothing, as student reads what the stu"),
    ],
)
def test_a_teacher_without_what_it_is_to_see_is_refused(chats: Path, capsys, teacher: dict[str, Any], said: str):
    small = {"data.max_length": 80, "data.completion_length": 12, "model": CHATS["model"], "data.train": "chats.jsonl"}
    own = {"algorithm": {"name": "distill", "on_policy": True}, "teacher": teacher}
    assert main(["run", recipe(chats, small, own)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "changes", "said"),
    [
        (None, {}, "teacher.path: teacher has no chat template, and the rows are chats: name it in teacher.chat_templ"),
        (
            HEADED.replace("<|eot_id|>", "<eos>"),
            {},
            "a turn ends with '<eos>' in the chat template of teacher and with",
        ),
        (HEADED.replace("+ m.content", "+ m.content + '.'"), {}, "row 1 of chats.jsonl: the chat template of teacher"),
        (HEADED, {"data.packing": "wrapped"}, "data.packing: wrapped makes pieces for the student alone, and teacher"),
        (HEADED, {"teacher.chat_template": "lama3"}, "teacher.chat_template is 'lama3', not one of"),
        (HEADED, {"teacher.chat_template": "gemma"}, "teacher.chat_template is 'gemma', but teacher has no token"),
        (HEADED, {"teacher.chat_template": "student", "teacher.max_length": 64}, "teacher: max_length is 64, and the"),
    ],
)
def test_a_teacher_that_cannot_read_the_rows_is_refused_before_weights(
    chats: Path, capsys, monkeypatch, template: str | None, changes: dict[str, Any], said: str
):
    monkeypatch.setattr("tunix.run.build.client_of", lambda *_, **__: pytest.fail("weights were read"))
    theirs = bytes_tokenizer("llama3")
    theirs.hf.chat_template = template
    (chats / "teacher/chat_template.jinja").unlink()
    theirs.save(chats / "teacher")
    assert main(["run", recipe(chats, {**CHATS, **GIVEN, **changes})]) == 2
    assert said in capsys.readouterr().err


# Several teachers.

NAMED: dict[str, Any] = {**CHATS, "data.train": "named.jsonl", "data.max_length": 80}


@pytest.fixture
def named(chats: Path) -> Path:
    """Rows that name a teacher in turns, in any column; the second teacher reads the student's format."""
    write_rows(chats / "named.jsonl", ({**chat(n), "of": ("big", "small")[n % 2]} for n in range(32)))
    model_folder(chats / "small", seed=5)
    return chats


def two(**of_small: Any) -> dict[str, Any]:
    """Two teachers, of which the rows name one."""
    return {"by_name": {"big": TEACHER, "small": {"path": "small", "dtype": "float32", **of_small}}, "column": "of"}


def test_rows_follow_the_teachers_that_they_name(named: Path):
    """The first update's divergence of all rows is the mean of those beside each teacher alone, by their tokens: the
    rows of each are written in a file of their own, of the first 8 rows 4."""
    firsts = {"steps": 1, "data.shuffle": False, "batch_size": 8}
    train(recipe(named, NAMED, GIVEN, firsts, teacher=two()), "output=both")
    (both,), alone = stepped("both"), list[tuple[float, float]]()
    for number, path in enumerate(("teacher", "small")):
        write_rows(named / "named.jsonl", (chat(n) for n in range(32) if n % 2 == number))
        train(
            recipe(named, NAMED, GIVEN, firsts, teacher={**TEACHER, "path": path}, batch_size=4),
            f"output=alone{number}",
        )
        (row,) = stepped(f"alone{number}")
        alone.append((row["distill/divergence"], row["train/tokens"]))
    wanted = sum(value * tokens for value, tokens in alone) / sum(tokens for _, tokens in alone)
    assert both["distill/divergence"] == pytest.approx(wanted, rel=1e-5)
    assert alone[0][0] != pytest.approx(alone[1][0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"divergence": "reverse_kl"}, {}], ids=["reverse_kl", "sampled"])
def test_a_run_with_two_teachers_ends_where_it_ends_when_it_is_stopped(named: Path, algorithm: dict[str, Any]):
    own = {**OWN, "data.max_length": 80, "algorithm": {**OWN["algorithm"], **algorithm}}
    words = recipe(named, {**NAMED, **own}, teacher=two(), steps=3, batch_size=4, checkpoint__every=1)
    train(words, "output=whole")
    train(words, "output=parts", "steps=1")
    train(words, "output=parts")
    for name in ("train/loss", "distill/divergence", "distill/teacher_logprob"):
        assert [row[name] for row in stepped("whole")] == [row[name] for row in stepped("parts")]
    assert all(row["compile/count"] == 0 for row in stepped("whole")[1:])


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (
            {**two(), "column": "off"},
            "row 1 of named.jsonl: teacher.column: off is None, and teacher.by_name has big, s",
        ),
        (
            {**two(), "by_name": {"big": TEACHER, "smal": TEACHER}},
            "row 2 of named.jsonl: teacher.column: of is 'small', and teacher.by_name has big, smal. Did you mean 'sm",
        ),
        ({**two(), "path": "teacher"}, "teacher: path: of several teachers each has its own"),
        ({**two(), "prompt": "{prompt}"}, "teacher: prompt: of several teachers each has its own"),
        (two(weight=2.0), "teacher: by_name.small.weight: changes nothing with column"),
        ({"by_name": {"big": {**TEACHER, "weight": 0}}}, "teacher: by_name: the weights of all teachers are 0"),
        ({"by_name": {"big": {**TEACHER, "weight": -1}}}, "teacher.by_name.big.weight"),
        ({**TEACHER, "column": "of"}, "teacher: column chooses among several teachers: name them in by_name"),
        (two(mesh={"fsdp": 1}), "teacher: by_name.small.mesh: several teachers share the student's devices"),
        (two(path="nowhere/at/all"), "nowhere/at/all"),
        ({"by_name": two()["by_name"]}, "teacher.by_name: big and small read the rows in different ways"),
    ],
)
def test_teachers_that_cannot_be_followed_are_refused_before_weights(
    named: Path, capsys, monkeypatch, teacher: dict[str, Any], said: str
):
    monkeypatch.setattr("tunix.run.build.client_of", lambda *_, **__: pytest.fail("weights were read"))
    assert main(["run", recipe(named, NAMED, GIVEN, teacher=teacher)]) == 2
    assert said in capsys.readouterr().err


# A teacher that was asked in advance.

KEPT: dict[str, Any] = {**CHATS, "data.train": "kept.jsonl", "teacher": {"path": "stored"}, "data.shuffle": False}


def kept(folder: Path, name: str = "kept.jsonl") -> list[dict[str, Any]]:
    """What `tunix score` writes of the rows and the eight most likely ids."""
    model_folder(folder / "small", seed=5)
    assert main(["score", "small", "chats.jsonl", "--top-k", "8", "--out", name]) == 0
    return lines(folder / name)


def test_what_a_teacher_said_in_advance_is_followed_without_it(chats: Path):
    """The divergence of the first eight rows by transformers: `KL(q || p)` of the token, the teacher's eight likeliest
    ids, and the others as one. Then a whole run, killed and not, to the bit."""
    written, sums, count = kept(chats), 0.0, 0
    for row in written[:8]:
        mask = np.array(row["loss_mask"], bool)
        assert len(row["top_ids"]) == mask.sum()
        log_p, log_q = (log_softmax(x, row["input_ids"])[:-1][mask[1:]] for x in ("student", "small"))
        for p, q, token in zip(log_p.exp(), log_q.exp(), np.array(row["input_ids"])[mask], strict=True):
            ids = sorted({int(token), *q.topk(8).indices.tolist()})
            p, q = (torch.cat([x[ids], 1 - x[ids].sum()[None]]) for x in (p, q))
            sums, count = sums + float((q * (q / p).log()).sum()), count + 1
    words = recipe(chats, {**KEPT, "algorithm": {"name": "distill"}, "steps": 3, "checkpoint.every": 1})
    train(words, "output=whole")
    assert stepped("whole")[0]["distill/divergence"] == pytest.approx(sums / count, abs=1e-5)
    assert all(row["compile/count"] == 0 for row in stepped("whole")[1:])
    train(words, "output=parts", "steps=1")
    train(words, "output=parts")
    assert [row["train/loss"] for row in stepped("whole")] == [row["train/loss"] for row in stepped("parts")]
    train(words, "output=apart", "data.packing=false", "steps=1")
    assert stepped("apart")[0]["train/loss"] == pytest.approx(stepped("whole")[0]["train/loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        (
            {"top_ids": [[1]]},
            {},
            "row 1 of kept.jsonl: top_ids and top_logprobs are [1, 1] and [3, 9], not both [3, k]",
        ),
        ({"top_ids": [[1], [2, 3], [4]]}, {}, "row 1 of kept.jsonl: top_ids and top_logprobs are not lists of equally"),
        ({"top_ids": [[999] * 9] * 3}, {}, "top_ids[0][0] is 999 with the log-prob"),
        ({"top_logprobs": [[0.5] * 9] * 3}, {}, "with the log-prob 0.5: ids are below 272, and log-probs at most 0"),
        (
            {"tokenizer": "0123456789ab"},
            {},
            "row 1 of kept.jsonl: the teacher's tokenizer is '0123456789ab', and the s",
        ),
        ({"top_logprobs": None}, {}, "row 1 of kept.jsonl: the column 'top_logprobs' is null"),
        ({}, {"data.train": "chats.jsonl"}, "row 1 of chats.jsonl: the teacher's tokenizer is None, and the student's"),
        ({}, {"algorithm": {"name": "distill", "on_policy": True}}, "teacher.path: stored log-probs are of the rows'"),
        ({}, {"algorithm": {"name": "distill", "top_k": 4}}, "algorithm.top_k: 4 changes nothing beside what"),
        (
            {},
            {"teacher": {"path": "stored", "prompt": "{prompt}!"}},
            "teacher: mesh, dtype, chat_template and prompt ch",
        ),
        ({}, {"data.packing": "wrapped"}, "whole and without pictures: leave data.packing at true or false"),
    ],
)
def test_stored_log_probs_that_do_not_fit_are_refused_before_weights(
    chats: Path, capsys, monkeypatch, row: dict[str, Any], changes: dict[str, Any], said: str
):
    monkeypatch.setattr("tunix.run.build.client_of", lambda *_, **__: pytest.fail("weights were read"))
    written = {
        "input_ids": [1, 2, 3, 4],
        "loss_mask": [0, 1, 1, 1],
        "top_ids": [list(range(9))] * 3,
        "top_logprobs": [[-1.0] * 9] * 3,
        "tokenizer": vocabulary(bytes_tokenizer("llama3")),
    }
    write_rows(chats / "kept.jsonl", [{**written, **row}] * 8)
    assert main(["run", recipe(chats, {**KEPT, "algorithm": {"name": "distill"}, **changes})]) == 2
    assert said in capsys.readouterr().err


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": None}, "teacher: distill learns from one"),
        ({"algorithm": {"name": "sft"}}, "teacher: changes nothing for sft"),
        ({"teacher": {}}, "teacher: path is missing"),
        (
            {"teacher": {"path": "teacher", "family": "llama"}},
            "teacher: family is that of a random teacher, and path is",
        ),
        ({"teacher": {"path": "teacher", "mesh": {"fsdp": -1}}}, "teacher.mesh: -1 leaves open"),
        ({"teacher": {"path": "teacher", "mesh": {"fsdp": 8}}}, "the teacher's mesh takes 8"),
        ({"teacher": {"path": "nowhere/at/all"}}, "nowhere/at/all"),
        ({"teacher": {"pth": "teacher"}}, "path"),
        ({"data.completion_length": 8}, "data.completion_length: changes nothing"),
        ({"rollout.temperature": 0.7}, "rollout: changes nothing for distill"),
        ({"algorithm": {"name": "distill", "on_policy": True}, "reward.functions": ["length"]}, "reward: distill"),
        ({"algorithm": {"name": "distill", "on_policy": True, "success": 1}}, "reward"),
        (
            {"algorithm": {"name": "distill", "on_policy": True, "success": 1}, "reward.functions": ["length"]},
            "algorithm.success: the teacher is shown nothing of what was sampled: write {attempt} or {feedback}",
        ),
        (
            {"algorithm": {"name": "distill", "success": 1}},
            "success is 1.0, which changes nothing without on_policy: true",
        ),
    ],
)
def test_mistakes_are_told(tmp_path: Path, teacher: Path, capsys, changes: dict[str, Any], said: str):
    assert main(["run", recipe(tmp_path, {**GIVEN, **changes})]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path, teacher: Path, capsys):
    # Both are bytes behind `<pad> <eos> <bos>`, ids 0 to 2, and the markers of a chat template, which differ from 3 on.
    bytes_tokenizer("gemma").save(teacher)
    assert main(["run", recipe(tmp_path, GIVEN)]) == 2
    told = capsys.readouterr().err
    assert "teacher.path: teacher has another vocabulary than the model that trains" in told
    assert "id 3 is '<start_of_turn>' there and '<|start_header_id|>' here" in told


def test_without_a_tokenizer_only_equal_tables_will_do(tmp_path: Path, capsys):
    model_folder(tmp_path / "teacher", tokenizer=False, vocab_size=288)
    assert main(["run", recipe(tmp_path, GIVEN)]) == 2
    assert "teacher.path: teacher has 288 ids and the student 272" in capsys.readouterr().err


def test_tiny_takes_a_small_random_teacher_of_the_students_family():
    path = Path(__file__).parents[2] / "recipes/distill_gemma.yaml"
    tiny = Recipe.load(path, tiny=True)
    assert tiny.teacher is not None
    assert (tiny.teacher.path, tiny.teacher.family) == (None, tiny.model.family)
    assert tiny.teacher.sizes["d_model"] > tiny.model.sizes["d_model"]
    assert tiny.mesh == "auto"
    assert RECIPE["model"]["tokenizer"] == tiny.model.tokenizer == "bytes"
