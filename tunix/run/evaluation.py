"""A run on held-out rows: the loss of given completions and the reward of sampled ones (`Evaluation`), rewards and
pass@k of tasks (`TaskEvaluation`), and greedy answers before and after training, displayed and in `samples.jsonl`
(`Samples`).

Axes: B rows, T time, S sequences.
"""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunix.algorithms.base import Algorithm
from tunix.algorithms.episodes import require_scores, reward_means, row, source_means, total_rewards
from tunix.data.config import DataConfig
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Packed, Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.hf.source import Source
from tunix.protocols import Client
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.config import EvalTask
from tunix.rollout.environments.remote import Player
from tunix.run.estimates import mean_of, means_of, passes
from tunix.trainer.config import SamplesConfig
from tunix.trainer.progress import Display
from tunix.types import Batch, Request
from tunix.util.atomic_io import PACKED, SAMPLES, append_rows


@dataclass(frozen=True)
class Evaluation:
    """The held-out rows of a run and how they are evaluated."""

    algorithm: Algorithm
    held_out: list[Packed] = field(default_factory=list)
    """Batches of given completions, for `eval/loss`; empty without any."""
    prompts: list[Prompt] = field(default_factory=list)
    """Prompts that are answered greedily and scored, for `eval/reward`; empty without rewards."""
    collector: Collector | None = None
    until: Mapping[str, float] = field(default_factory=dict)
    """`eval.until`: metric -> value at which the run ends early, e.g. `{"eval/reward": 0.9}`."""
    by_source: Mapping[str, list[Packed]] = field(default_factory=dict)
    """The batches of `held_out` for each data set of several."""

    def __bool__(self) -> bool:
        return bool(self.held_out or self.prompts)

    def values(self, client: Client) -> dict[str, float]:
        """All metrics: `eval/loss` and the loss's metrics, `eval/reward` and the mean of each reward."""
        metrics = self.algorithm.evaluate(client, self.held_out) if self.held_out else {}
        for source, batches in self.by_source.items():
            metrics[f"eval/loss/source/{source}"] = self.algorithm.evaluate(client, batches)["eval/loss"]
        if self.prompts:
            assert self.collector is not None
            client.publish()
            groups = self.collector.collect(client, self.prompts, 1, seed=0)
            require_scores(groups)
            each = {f"eval/reward/{name}": mean for name, mean in reward_means(groups).items()}
            metrics |= {"eval/reward": float(np.nanmean(total_rewards(groups, self.collector.weights)))}
            metrics |= each if len(each) > 1 else {}
            by_source = source_means(groups, self.collector.weights)
            metrics |= {f"eval/reward/source/{name}": mean for name, mean in by_source.items()}
        return metrics

    def reached(self, values: Mapping[str, float]) -> str | None:
        """The first metric that has reached its target in `until`: a loss, or a perplexity or bits of a harness, at or
        below it, others at or above."""
        for name, target in self.until.items():
            falls = name.split("/")[1] == "loss" or name.endswith(("perplexity", "bits_per_byte"))
            if name in values and (values[name] <= target if falls else values[name] >= target):
                return name
        return None


@dataclass(frozen=True)
class TaskEvaluation:
    """A task of `eval.tasks`, whose prompts are answered and scored."""

    config: EvalTask
    """Its settings, with the run's environment and rewards where it has none."""
    prompts: list[Prompt]
    collector: Collector
    """Plays and scores its episodes; its temperature is that of `rollout`."""

    def measure(self, client: Client) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Its metrics, and the rows of all answers for `samples.jsonl`.

        The seed is the same at every evaluation, so that two of them differ by the weights alone.

        Raises:
            UserError: not one answer could be scored.
        """
        config, rows, totals = self.config, list[dict[str, Any]](), dict[tuple[float, int], np.ndarray]()
        most, warm = max(config.pass_at, default=1), config.temperature
        # Temperature and number of answers of the reward, and of pass@k, which may be the same.
        single = warm or 0.0, 1
        several = (self.collector.sampling.temperature if warm is None else warm, most) if most > 1 else single
        for temperature, n in dict.fromkeys((single, several)):
            sampling = replace(self.collector.sampling, temperature=temperature)
            try:
                groups = replace(self.collector, sampling=sampling).collect(client, self.prompts, n, seed=0)
                require_scores(groups)
            except UserError as error:
                raise UserError(f"eval.tasks, {config.name}: {error}") from error
            totals[temperature, n] = total_rewards(groups, self.collector.weights)
            said = {"task": config.name, "temperature": temperature}
            rows += [{**said, **row(place, x)} for place, group in enumerate(groups) for x in group]
        estimates = {"reward": mean_of(means_of(totals[single]))}
        estimates |= passes(totals[several], config.success, config.pass_at)
        begin = f"eval/{config.name}/"
        metrics = {begin + key: x.value for key, x in estimates.items()}
        metrics |= {f"{begin}{key}_se": x.error for key, x in estimates.items() if x.error is not None}
        failed = np.isnan(np.concatenate([x.ravel() for x in totals.values()]))
        return metrics | {f"{begin}failed": float(failed.mean())}, rows


@dataclass(frozen=True)
class HarnessEvaluation:
    """A task of `eval.tasks` that lm-eval measures."""

    config: EvalTask
    source: Source
    """The tokenizer, and what ends a completion."""
    chat: bool
    """Whether prompts are messages of the chat template."""
    data: DataConfig
    """The system message and the variables of the chat template, and the limit of a prompt with its answer."""

    def measure(self, client: Client) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Its metrics, and the rows of all answers for `samples.jsonl`; one process asks for all of them.

        Raises:
            UserError: its file cannot be read, or asks for what is not computed.
        """
        from tunix.run.lm_eval import SampledLM, measure

        name, spec, tokenizer = self.config.name, self.config.harness_task, self.source.tokenizer
        assert spec is not None
        assert tokenizer is not None

        def measured() -> Any:
            kwargs, system = self.data.template_kwargs, self.data.system if self.chat else None
            # The sampler has room for max_length tokens, of which the last one may be one that is scored.
            length = self.data.max_length - 1
            model = SampledLM(client, tokenizer, length, self.source.stop_ids, kwargs, system)
            try:
                metrics, rows = measure(model, [spec], self.config.n, chat=self.chat)
            except UserError as error:
                raise UserError(f"eval.tasks, {name}: {error}") from error
            return {key: (x.value, x.error) for key, x in metrics.items()}, rows

        metrics, rows = processes.broadcast("harness", measured)
        # A file of one task needs no second name.
        tasks = {key.partition("/")[0] for key in metrics}
        named = {key.partition("/")[2] if len(tasks) == 1 else key: x for key, x in metrics.items()}
        values = {f"eval/{name}/{key}": value for key, (value, _) in named.items()}
        values |= {f"eval/{name}/{key}_se": error for key, (_, error) in named.items() if error is not None}
        return values, [{"task": name, **row} for row in rows]


SHOWN = 240
"""Characters of a prompt or an answer that are displayed, of a longer one its beginning and its end."""


@dataclass
class Samples:
    """Prompts of a run, and the file and display that receive their answers; the file that receives rollouts.

    A thread writes rollouts while the device goes on, one step at a time: who hands it a step waits for the one before.
    """

    requests: List[Request]
    """The prompts: token ids up to the first trained token."""
    expected: List[Any]
    """The completion of each prompt in the data: text, or ids where there is no tokenizer."""
    client: Client
    tokenizer: Tokenizer | None
    path: Path
    """`samples.jsonl` of the run folder, or `samples.jsonl.gz`."""
    display: Display
    config: SamplesConfig = field(default_factory=SamplesConfig)
    texts: dict[int, str] = field(default_factory=dict)
    """Token id -> its text, of those that were written."""
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "samples"))
    _writing: Future[None] | None = None
    _full: bool = False
    """Whether it was said that there is no room."""

    def take(self, step: int) -> None:
        """Answers all prompts with the current weights; writes and displays the answers."""
        if not self.requests:
            return
        self.client.publish()

        def answered() -> list[dict[str, Any]]:
            answers = self.client.run(self.requests)
            return [
                {
                    "prompt": readable_tokens(request.prompt, self.tokenizer),
                    "completion": readable_tokens(answer.tokens, self.tokenizer),
                    "expected": expected,
                    "finish": answer.finish,
                }
                for request, expected, answer in zip(self.requests, self.expected, answers, strict=True)
            ]

        # No more than one process writes them down.
        rows = processes.broadcast("samples", answered)
        self.add(step, rows)
        for sample in rows:  # shortened; the file has all of it
            self.display.say(f"  step {step}  {_shortened(' '.join(str(sample['prompt']).split()))}")
            self.display.say(f"      answers: {_shortened(repr(str(sample['completion']).strip()))}")
            self.display.say(f"     expected: {_shortened(repr(str(sample['expected']).strip()))}")

    def record(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Has rollouts of a step written, those that the config asks for."""
        if step % self.config.every == 0:
            groups = self.config.groups
            self.add(step, rows if groups == "all" else itertools.takewhile(lambda row: row["group"] < groups, rows))

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Has rows of a step written, without displaying them; errors as of `wait`."""
        self.wait()
        self._writing = self._writer.submit(self._write, step, rows)

    def wait(self) -> None:
        """Waits until all rows are in the file.

        Raises:
            UserError: it could not be written.
        """
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Ends the thread, after what it was handed."""
        self._writer.shutdown()

    def _write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows, ids among the values of tokens as texts; nothing where they have no room in the file."""
        listed = [{"step": step, **values} for values in rows]
        if tokenizer := self.tokenizer:
            for sample in (sample for sample in listed if "per_token" in sample):
                ids = sample["per_token"]["tokens"]
                for i in set(ids) - self.texts.keys():
                    # After another token, where a tokenizer keeps the space before it.
                    self.texts[i] = tokenizer.decode([i], previous=[i]) or tokenizer.decode([i])
                sample["per_token"] = {**sample["per_token"], "tokens": [self.texts[i] for i in ids]}
        if listed and not append_rows(self.path, listed, int(self.config.megabytes * 1e6)) and not self._full:
            self._full = True
            self.display.say(
                f"step {step}: {self.path.name} has reached logging.samples.megabytes, {self.config.megabytes:g}: a "
                "step that has no room in it is not recorded"
            )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} ... {text[-SHOWN // 3 :]}"


def readable_tokens(tokens: np.ndarray, tokenizer: Tokenizer | None) -> Any:
    """Text without special tokens, or the ids where there is no tokenizer."""
    return tokenizer.decode(tokens, skip_special=True) if tokenizer else tokens.tolist()


def samples_of(
    recipe: Recipe, evaluation: Evaluation, client: Client, tokenizer: Tokenizer | None, folder: Path, display: Display
) -> Samples:
    """Held-out prompts whose greedy answers are shown before and after training; of episodes, the first turn; of given
    rows, the desirable ones."""
    number = recipe.eval.samples if recipe.algorithm.has_lm_head else 0
    if evaluation.prompts:
        shown = evaluation.prompts[:number]
        prompts: list = [prompt.tokens for prompt in shown]
        pictures = [prompt.pictures for prompt in shown]
        collector = evaluation.collector
        for index, prompt in enumerate(shown):
            play = collector.of(prompt.source).play if collector else None
            if isinstance(play, Player) and (episode := play([prompt.row], 0, [index]).episodes[0]) is not None:
                prompts[index] = episode.prompt
        expected: list = [prompt.row.get("completion", prompt.row.get("answer", "")) for prompt in shown]
    else:
        per_example = evaluation.algorithm.sequences_per_example
        chosen = (sequence for packed in evaluation.held_out for sequence in packed.sequences[::per_example])
        desirable = (sequence for sequence in chosen if sequence.per_sequence.get("label", 1.0))
        starts = ((sequence, int(np.argmax(sequence.loss_mask))) for sequence in desirable)
        # Each is split before its first trained token; those that are trained from their first one on have no prompt.
        split = list(itertools.islice(((sequence, start) for sequence, start in starts if start > 1), number))
        prompts = [sequence.tokens[:start] for sequence, start in split]
        pictures = [sequence.pictures and sequence.pictures.within(0, start) for sequence, start in split]
        expected = [readable_tokens(sequence.tokens[start:], tokenizer) for sequence, start in split]
    greedy = replace(evaluation.algorithm.sampling, max_tokens=recipe.eval.sample_tokens, temperature=0.0)
    asked = enumerate(zip(prompts, pictures, strict=True))
    requests = [Request(prompt, greedy, 0, index, pictures=seen) for index, (prompt, seen) in asked]
    config = recipe.logging.samples
    path = folder / (SAMPLES if config.groups in (0, 1) else PACKED)
    return Samples(requests, expected, client, tokenizer, path, display, config)


def unigram_entropy(batches: List[Batch]) -> float:
    """The entropy in nats of the trained tokens' frequencies: the loss of predicting tokens by frequency alone."""
    trained = np.concatenate([np.asarray(batch.tokens)[np.asarray(batch.loss_mask)] for batch in batches])
    shares = np.unique(trained, return_counts=True)[1] / trained.size
    return float(-(shares * np.log(shares)).sum())
