"""Tasks of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) over our samplers.

The harness renders prompts, filters answers and computes metrics; log-probs and completions come from a sampler. A
text to score is one request, whose prompt is the context with its continuation (`Sampling.prompt_logprobs`). Contexts
are cut on the left, and long texts scored in windows, as the harness's `hf` model does: the numbers are the same.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.inference.model import InferenceModel
from tunix.protocols import SamplingClient
from tunix.run.estimates import Estimate
from tunix.types import Completion, Request, Sampling

os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork a process that has threads
BOOTSTRAPS = 1000
"""Resamples for the standard error of a metric that is no mean."""
FEWSHOT_SEED = 1234
"""The harness's own, which chooses the examples of a prompt."""
LONGEST = 256
"""Tokens of an answer at most, where a task does not say: the harness's own default."""
SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "min_p")
"""What a task may say of how answers are sampled, beside `until` and their length."""


@dataclass(eq=False)
class SampledLM(TemplateLM):
    """A sampler as a model of the harness."""

    sampler: SamplingClient
    tokens: Tokenizer
    max_length: int
    """Tokens that the model reads at most; the sampler has room for one more."""
    stop_ids: tuple[int, ...]
    """End a completion, e.g. `(1, 107)`."""
    template_kwargs: Mapping[str, Any]
    """Variables of the chat template."""
    system: str | None = None
    """The system message of chats."""

    def __post_init__(self) -> None:
        super().__init__()
        self.tokenizer = self.tokens.hf

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        return self.tokens.eos_id if self.tokens.bos_id is None else self.tokens.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; its last turn goes on where no generation prompt is added."""
        text: Any = self.tokens.hf.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.template_kwargs,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, unless the text begins with BOS or that is said."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokens.decode([self.prefix_token_id]))
        ids: Any = self.tokens.hf.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Log-prob of each continuation after its context, and whether each of its tokens is the most likely one."""
        prompts = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        completions = self._run(prompts, [Sampling(max_tokens=0, prompt_logprobs=True, top_logprobs=1)] * len(prompts))
        answers = []
        for prompt, (_, _, continuation), completion in zip(prompts, requests, completions, strict=True):
            scores, number = completion.prompt_scores, min(len(continuation), len(prompt) - 1)
            assert scores is not None, "they were asked for"
            greedy = scores.top_ids[-number:, 0].tolist() == prompt[-number:]
            answers.append((float(scores.logprobs[-number:].sum(dtype=np.float64)), greedy))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-prob of each text, in windows that each token is in once, with as much before it as there is room for."""
        windows, texts = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                texts.append(number)
        sums = np.zeros(len(requests))
        np.add.at(sums, texts, [logprob for logprob, _ in self._loglikelihood_tokens(windows)])
        return sums.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to the first of the texts that end it.

        Raises:
            UserError: a task says something of the sampling that is not computed, or leaves no room for its context.
        """
        prompts, samplings, stops = [], list[Sampling](), []
        for request in requests:
            context, *settings = request.args
            if len(settings) != 1:
                raise UserError(f"{request.task_name}: its prompts have pictures or sounds, which are not read here")
            said: dict[str, Any] = {**normalize_gen_kwargs(settings[0], LONGEST)}
            most = said.pop("max_gen_toks")
            stops.append(handle_stop_sequences(said.pop("until"), self.tokens.decode([self.tokens.eos_id])))
            if unknown := said.keys() - {*SETTINGS}:
                raise UserError(f"{request.task_name}: generation_kwargs: {min(unknown)} is not computed here")
            if most >= self.max_length:
                raise UserError(
                    f"{request.task_name}: max_gen_toks {most} leaves no room for a prompt in {self.max_length} tokens"
                )
            samplings.append(
                Sampling(
                    max_tokens=most,
                    temperature=said.get("temperature", 1.0) if said["do_sample"] else 0.0,
                    top_k=said.get("top_k", 0),
                    top_p=said.get("top_p", 1.0),
                    min_p=said.get("min_p", 0.0),
                    stop_ids=self.stop_ids,
                    stop_strings=tuple(filter(None, stops[-1])),
                )
            )
            prompts.append(self.tok_encode(context)[most - self.max_length :])
        texts = [self.tokens.decode(x.tokens, skip_special=True) for x in self._run(prompts, samplings)]
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]

    def _run(self, prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Completion]:
        asked = enumerate(zip(prompts, samplings, strict=True))
        return self.sampler.run([Request(np.array(prompt, np.int32), x, 0, i) for i, (prompt, x) in asked])


def loaded(inference: InferenceModel, *, chat: bool) -> SampledLM:
    """A model as the harness asks it, in an engine of its own; of chats with the system message.

    Raises:
        UserError: the weights are not accessible, or there is no tokenizer.
    """
    if (tokenizer := inference.tokenizer) is None:
        raise UserError(f"{inference.options.model} has no tokenizer, and the harness asks in texts")
    model, params, mesh = inference.weights()
    # A text as long as the model reads, and what follows it, have room.
    engine = inference.new_engine(model, mesh, further=1)
    engine.publish(params, version=0)
    kwargs, system = inference.template_kwargs, inference.system if chat else None
    return SampledLM(engine, tokenizer, inference.limit, inference.source.stop_ids, kwargs, system)


def measure(
    model: SampledLM, tasks: Sequence[str], limit: int | None, *, chat: bool
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Measures tasks of the harness.

    Args:
        model: answers.
        tasks: files, or names of tasks of the harness, which reads their documents from the hub.
        limit: documents of each task, from the start; None for all.
        chat: whether prompts are messages of the chat template.

    Returns:
        Metrics by task, metric and filter, e.g. `{"arc/acc": ..., "gsm/exact_match,strict": ...}`; and prompt, answers
        and metrics of each document, as JSON values.

    Raises:
        UserError: a task cannot be read, or asks for what is not computed here.
    """
    manager = TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # whatever the task's own code and the reader of its documents raise
        raise UserError(f"lm-eval cannot read {', '.join(tasks)}: {type(error).__name__}: {error}") from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    results: Any = evaluate(
        lm=model,
        task_dict=loaded,
        limit=limit,
        bootstrap_iters=BOOTSTRAPS,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        system_instruction=model.system,
    )
    metrics, counts = dict[str, Estimate](), results["n-samples"]
    for name, values in results["results"].items():
        members = [name] if name in counts else [x for x in results["group_subtasks"][name] if x in counts]
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{chosen}")
                key = f"{name}/{metric}" + ("" if chosen == "none" else f",{chosen}")
                count = sum(counts[x]["effective"] for x in members)
                metrics[key] = Estimate(float(value), error if isinstance(error, float) else None, count)
    rows = [
        {
            "harness_task": name,
            "row": sample["doc_id"],
            "filter": sample["filter"],
            "prompt": sample["arguments"][0][0],
            "target": sample["target"],
            "answers": sample["filtered_resps"],
            **{metric: sample[metric] for metric in sample["metrics"]},
        }
        for name, samples in results["samples"].items()
        for sample in samples
    ]
    return metrics, json.loads(json.dumps(rows, default=str))
