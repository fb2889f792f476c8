"""The result of a finished run: its metrics, samples and export, and their summary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.config import RowKind
from tunix.recipe.recipe import Recipe
from tunix.trainer.metrics import perplexity
from tunix.util.json_lines import read_rows


@dataclass(frozen=True)
class RunResult:
    """The metrics, samples and exported weights of a finished run."""

    folder: Path
    """The run folder; with stages, that of the last one."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl, e.g. `{"step": 7, "train/loss": 2.04}`."""
    samples: list[dict[str, Any]]
    """The rows of samples.jsonl."""
    unigram_entropy: float | None
    """Held-out loss in nats of predicting tokens by their frequency alone; None where it is not computed."""

    @property
    def export(self) -> Path:
        """The exported weights: a Hugging Face folder, or a PEFT adapter."""
        return self.folder / "export"


def result_of(folder: Path, entropy: float | None) -> RunResult:
    """Reads the result of a finished run from its folder."""
    return RunResult(folder, read_rows(folder / "metrics.jsonl"), read_rows(folder / "samples.jsonl"), entropy)


def summary(result: RunResult, recipe: Recipe, picture: Path | None) -> str:
    """The final lines of a run: what was reached, where the weights are, how to continue.

    Args:
        picture: the file of its curves; None without one.
    """
    lines: list[str] = []
    rewards = [row["eval/reward"] for row in result.metrics if "eval/reward" in row]
    if rewards:
        lines.append(f"held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f} (greedy answers)")
    accuracies = [row["eval/rewards/accuracy"] for row in result.metrics if "eval/rewards/accuracy" in row]
    if accuracies:
        sides = (
            "completions on their label's side"
            if recipe.algorithm.reads == RowKind.LABELS
            else "pairs in the right order"
        )
        lines.append(f"held-out {sides} {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    divergences = [row["eval/distill/divergence"] for row in result.metrics if "eval/distill/divergence" in row]
    if divergences:
        lines.append(f"held-out distance to the teacher {divergences[0]:.3f} -> {divergences[-1]:.3f} nats per token")
    losses = [row["eval/loss"] for row in result.metrics if "eval/loss" in row]
    if losses and result.unigram_entropy is not None:
        first, last = losses[0], losses[-1]
        lines.append(f"held-out loss {first:.3f} -> {last:.3f} nats per token (perplexity {perplexity(last):.3g})")
        # What an adapter can do on a random model, as with --tiny, says nothing beside it.
        if recipe.adapter is None or recipe.model.init == "pretrained":
            lines.append(f"knowing only how common each token is would give {result.unigram_entropy:.3f}")
    lines += [f"curves: {picture}"] if picture else []
    lines.append(f"weights: {result.export}")
    model = f'"model={{path: {result.folder}, dtype: {recipe.model.dtype}}}"'
    lines.append(f"go on from there: tunix run {result.folder}/recipe.yaml {model} output={result.folder}-next")
    return "\n".join(lines)
