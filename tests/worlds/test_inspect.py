"""Inspect's `openai-api` provider, unmodified, against `tunix serve`: a scorer, tools in a loop, log-probs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

from tests.serving.conftest import listening
from tests.worlds.test_openai import TEMPLATE
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.answers import Reader
from tunix.serving.app import tiny_source
from tunix.serving.gate import Gate
from tunix.serving.service import Service

pytestmark = [pytest.mark.worlds, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    source = tiny_source()
    assert source.tokenizer is not None
    source = replace(source, tokenizer=source.tokenizer.replace_template(TEMPLATE))
    service = Service(InferenceModel(InferenceOptions("tiny", slots=4), source), devices=jax.devices()[:1])
    with listening(service, Gate(key="secret")) as url:
        yield url
    service.batches.close()


@tool
def double() -> Tool:
    async def execute(a: int) -> str:
        """Twice a number.

        Args:
            a: the number.
        """
        return str(2 * a)

    return execute


def measured(task: Task, url: str, folder: Path, **settings: object) -> EvalLog:
    model = get_model(
        "openai-api/tunix/tiny", base_url=f"{url}/v1", api_key="secret", strict_tools=False, memoize=False
    )
    (log,) = eval(task, model, log_dir=str(folder), display="none", max_tokens=12, **settings)
    assert log.status == "success", log.error
    return log


def test_a_task_is_measured(url: str, tmp_path: Path):
    """Greedy answers are the same again, which the target is then; each token has its log-prob and alternatives."""
    prompts = ["What is 2 + 3?", "Hi"]
    samples = [Sample(input=prompt, target="x") for prompt in prompts]
    settings = {"temperature": 0.0, "seed": 1, "logprobs": True, "top_logprobs": 2}
    first = measured(Task(samples, solver=generate(), scorer=includes()), url, tmp_path, **settings)
    assert first.samples is not None
    outputs = [sample.output for sample in first.samples]
    for output in outputs:
        logprobs = output.choices[0].logprobs
        assert logprobs is not None
        assert output.usage is not None
        assert len(logprobs.content) == output.usage.output_tokens <= 12
        assert all(entry.logprob <= 0 and len(entry.top_logprobs or ()) == 2 for entry in logprobs.content)
    again = [Sample(input=x, target=output.completion) for x, output in zip(prompts, outputs, strict=True)]
    second = measured(Task(again, solver=generate(), scorer=includes()), url, tmp_path, **settings)
    assert second.results is not None
    assert second.results.scores[0].metrics["accuracy"].value == 1.0


def test_tools_in_a_loop(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    call = '<tool_call>\n{"name": "double", "arguments": {"a": 2}}\n</tool_call>'
    # The last one is read twice: as a turn, and as text since it calls nothing.
    said = [f"Wait. {call}", "It is 4.", "It is 4."]
    monkeypatch.setattr(Reader, "read", lambda _, x, *, ended: (said.pop(0) if ended else "", slice(len(x.tokens))))
    log = measured(
        Task([Sample("Twice 2?", target="It is 4.")], solver=[use_tools(double()), generate()], scorer=includes()),
        url,
        tmp_path,
    )
    assert log.samples is not None
    assert [message.role for message in log.samples[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert log.samples[0].messages[2].text == "4"
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
