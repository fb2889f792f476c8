"""EleutherAI's lm-evaluation-harness, unmodified: its numbers in process are those of its own `hf` model, and through
the server those in process."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from tests.serving.conftest import listening
from tests.test_pages import HUB_ID, blocks
from tests.tiny_runs import RECIPE, lines, model_folder, rows, write_rows
from tunix.cli import main
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.service import Service

pytestmark = [pytest.mark.worlds, pytest.mark.filterwarnings("default")]
LENGTH = 128
DOCUMENTS = [
    {
        "question": f"What is {i} + {3 * i % 7}?",
        "choices": [f" {i + 3 * i % 7}", f" {i}", f" none of these, {i}"],
        "answer": i % 3,
        "text": f"A sum of {i}, " * (3 * i + 1),
    }
    for i in range(6)
]
"""Texts of up to 192 tokens, for windows of 128."""
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: documents.jsonl}}\ntest_split: test\n"
ASKS = 'doc_to_text: "{{question}}"\ndoc_to_target: "{{choices[answer]}}"\n'
TASKS = {
    "choose": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "last": ASKS + "output_type: loglikelihood\nmetric_list: [{metric: acc}, {metric: perplexity}]\n",
    "whole": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]\n",
    "answer": ASKS + 'output_type: generate_until\ngeneration_kwargs: {until: ["\\n", "3"], max_gen_toks: 12}\n'
    "metric_list: [{metric: exact_match}]\n",
    "shown": ASKS + "num_fewshot: 2\nfewshot_split: test\noutput_type: generate_until\n"
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n',
}
FILES = [f"{name}.yaml" for name in TASKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "llama", max_position_embeddings=LENGTH)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tasks are, and nothing is asked of the hub."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "documents.jsonl", DOCUMENTS)
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{text}")
    return tmp_path


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    service = Service(InferenceModel(InferenceOptions(str(model), slots=4)), devices=jax.devices()[:1])
    with listening(service) as url:
        yield url
    service.batches.close()


def said(results: Mapping[str, Any]) -> tuple[dict[str, float], dict[tuple[str, int], list[Any]]]:
    """The metrics of a result of the harness by our names, and the answers to each document."""
    metrics = {
        f"{task}/{key.removesuffix(',none')}": value
        for task, values in results["results"].items()
        for key, value in values.items()
        if key.endswith(",none") and "_stderr" not in key
    }
    samples = ((task, sample) for task, listed in results["samples"].items() for sample in listed)
    return metrics, {(task, sample["doc_id"]): sample["filtered_resps"] for task, sample in samples}


def ours(model: Path, *words: str) -> tuple[dict[str, float], dict[tuple[str, int], list[Any]]]:
    """The same of `tunix eval`."""
    assert main(["eval", str(model), "--harness", "lm-eval", "--out", "out.json", *words]) == 0
    out = json.loads(Path("out.json").read_text())
    metrics = {name: number["value"] for name, number in out["metrics"].items()}
    return metrics, {(row["harness_task"], row["row"]): row["answers"] for row in out["rows"]}


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Equal texts and choices, log-probs within 1e-4, and so metrics."""
    (metrics, answers), (other_metrics, other_answers) = one, other
    assert metrics.keys() == other_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, other_metrics[name], rtol=1e-4, err_msg=name)
    assert answers.keys() == other_answers.keys()
    for key, listed in answers.items():
        for answer, expected in zip(listed, other_answers[key], strict=True):
            if isinstance(answer, str):
                assert answer == expected, key
            else:
                numbers, others = np.ravel(answer).astype(float), np.ravel(expected).astype(float)
                np.testing.assert_allclose(numbers, others, rtol=1e-6, atol=1e-4, err_msg=str(key))


@pytest.mark.parametrize("chat", [False, True])
def test_the_numbers_are_those_of_its_own_model(model: Path, chat: bool, capsys: pytest.CaptureFixture[str]):
    """Log-probs, greedy flags, windows of long texts, answers, and examples in prompts as turns or as text."""
    hf = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=3)
    assert hf.max_length == LENGTH
    system = {"system_instruction": "Be brief."} if chat else {}
    results = simple_evaluate(hf, tasks=FILES, apply_chat_template=chat, fewshot_as_multiturn=chat, **system)
    assert results is not None
    words = ["--system", "Be brief."] if chat else ["--raw"]
    measured = ours(model, "--tasks", *FILES, *words)
    same(measured, said(results))
    assert len(measured[1]) == len(TASKS) * len(DOCUMENTS)
    shown = capsys.readouterr().out
    assert ("prompts are messages of the chat template" if chat else "--raw was given") in shown
    assert "choose/acc_norm" in shown


def completions(model: Path, url: str, tasks: list[str], **settings: Any) -> tuple[Any, Any]:
    """What its client for completions says of tasks."""
    arguments = {"base_url": f"{url}/v1/completions", "model": str(model), "max_length": LENGTH, **settings}
    results = simple_evaluate("local-completions", arguments, tasks=tasks)
    assert results is not None
    return said(results)


@pytest.mark.parametrize(
    "settings", [{"batch_size": 4}, {"num_concurrent": 3, "tokenized_requests": False}], ids=["ids", "texts"]
)
def test_completions_from_the_server(model: Path, url: str, settings: dict[str, Any]):
    """Its `local-completions` has log-probs of prompts and answers from `tunix serve`, as in process: several prompts
    of token ids in a request, or texts."""
    tasks = ["choose.yaml", "last.yaml", "answer.yaml"]
    settings |= {"tokenizer_backend": "huggingface", "add_bos_token": True}
    same(completions(model, url, tasks, **settings), ours(model, "--raw", "--tasks", *tasks))


def test_the_tokenizer_of_the_server(model: Path, url: str):
    """Which it asks by itself, and which adds no BOS."""
    local = completions(model, url, ["choose.yaml"], tokenizer_backend="huggingface", num_concurrent=3)
    same(completions(model, url, ["choose.yaml"], num_concurrent=3), local)


def test_chats_from_the_server(model: Path, url: str):
    """Its `local-chat-completions`: the server renders what `tunix eval` renders in process."""
    arguments = {"base_url": f"{url}/v1/chat/completions", "model": str(model), "num_concurrent": 3}
    arguments |= {"eos_string": "<eos>"}
    tasks = ["answer.yaml"]
    results = simple_evaluate("local-chat-completions", arguments, tasks=tasks, apply_chat_template=True)
    assert results is not None
    same(said(results), ours(model, "--tasks", *tasks))


def run(folder: Path, **sections: Any) -> int:
    """A run of two updates in this folder, with a task of the harness at each evaluation."""
    write_rows(folder / "train.jsonl", rows(16))
    recipe = {**RECIPE, "steps": 2, "data": {**RECIPE["data"], "max_length": 96, "completion_length": 16}, **sections}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return main(["run", "recipe.yaml"])


def test_a_task_while_training(folder: Path):
    """Before the first update and after the last; the last numbers are those of `tunix eval` of what was exported."""
    tasks = [{"name": "sums", "data": "lm-eval:choose.yaml", "n": 4}, {"name": "said", "data": "lm-eval:answer.yaml"}]
    assert run(folder, eval={"every": 2, "tasks": tasks, "until": {"eval/sums/acc": 2.0}}) == 0
    first, last = (line for line in lines(folder / "run/metrics.jsonl") if "eval/sums/acc" in line)
    assert (first["step"], last["step"]) == (0, 2)
    assert {"eval/sums/acc_norm", "eval/sums/acc_se", "eval/said/exact_match"} <= last.keys()
    samples = lines(folder / "run/samples.jsonl")
    assert [x["step"] for x in samples if x.get("task") == "sums"] == [0] * 4 + [2] * 4
    metrics, answers = ours(folder / "run", "--raw", "--tasks", "choose.yaml", "--rows", "4")
    assert metrics["choose/acc"] == last["eval/sums/acc"]
    for sample in samples[-4 - len(DOCUMENTS) : -len(DOCUMENTS)]:
        np.testing.assert_allclose(
            np.ravel(sample["answers"]), np.ravel(answers["choose", sample["row"]]), atol=1e-3, err_msg=str(sample)
        )


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (ASKS + "output_type: loglikelihoo\n", "lm-eval cannot read bad.yaml: "),
        ("output_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\nmetric_list: [{metric: exact_match}]\n"
         "generation_kwargs: {num_beams: 3}\n", "bad: generation_kwargs: num_beams is not computed here"),
        ("output_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\nmetric_list: [{metric: exact_match}]\n",
         "bad: max_gen_toks 256 leaves no room for a prompt in 128 tokens"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be_measured(
    model: Path, folder: Path, text: str, fragment: str, capsys: pytest.CaptureFixture[str]
):
    (folder / "bad.yaml").write_text(f"task: bad\n{COMMON}{text}")
    assert main(["eval", str(model), "--raw", "--harness", "lm-eval", "--tasks", "bad.yaml"]) == 2
    assert fragment in capsys.readouterr().err


def test_a_task_that_is_not_there(model: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", str(model), "--raw", "--harness", "lm-eval", "--tasks", "nowhere.yaml"]) == 2
    assert "lm-eval cannot read nowhere.yaml: KeyError" in capsys.readouterr().err


def test_the_page(model: Path, folder: Path):
    (block,) = blocks("docs/guide/harnesses.md", "python")
    exec(compile(block.text.replace(HUB_ID, str(model)), "harnesses.md", "exec"), {})
    numbers = json.loads((folder / "sums.json").read_text())["metrics"]["sums/acc"]
    assert numbers["count"] == 8
    assert 0 <= numbers["value"] <= 1
