"""What a finished run left behind, and the lines that say so."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.recipe.recipe import Recipe
from tunix.trainer.metrics import perplexity, read_rows


@dataclass(frozen=True)
class RunResult:
    """What a finished run left behind."""

    folder: Path
    """The run folder; of the last stage where there are stages."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl."""
    samples: list[dict[str, Any]]
    """The rows of samples.jsonl."""
    unigram_entropy: float | None
    """Nats: the held-out loss of knowing nothing but how common each token is; None where that is not measured."""

    @property
    def export(self) -> Path:
        """The exported weights: a Hugging Face folder, or a PEFT adapter."""
        return self.folder / "export"


def result_of(folder: Path, entropy: float | None) -> RunResult:
    """What the files of a finished run say."""
    return RunResult(folder, read_rows(folder / "metrics.jsonl"), read_rows(folder / "samples.jsonl"), entropy)


def summary(result: RunResult, recipe: Recipe, picture: Path | None) -> str:
    """The last words of a run: what was reached, where it is, how to go on.

    Args:
        picture: of its curves, where there were numbers to draw.
    """
    lines: list[str] = []
    rewards = [row["eval/reward"] for row in result.metrics if "eval/reward" in row]
    if rewards:
        lines.append(f"held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f} (greedy answers)")
    told = [row["eval/rewards/accuracy"] for row in result.metrics if "eval/rewards/accuracy" in row]
    if told:
        sides = (
            "completions on their label's side" if recipe.algorithm.reads == "labels" else "pairs in the right order"
        )
        lines.append(f"held-out {sides} {told[0]:.3f} -> {told[-1]:.3f}")
    apart = [row["eval/distill/divergence"] for row in result.metrics if "eval/distill/divergence" in row]
    if apart:
        lines.append(f"held-out distance to the teacher {apart[0]:.3f} -> {apart[-1]:.3f} nats per token")
    losses = [row["eval/loss"] for row in result.metrics if "eval/loss" in row]
    if losses and result.unigram_entropy is not None:
        first, last = losses[0], losses[-1]
        lines.append(f"held-out loss {first:.3f} -> {last:.3f} nats per token (perplexity {perplexity(last):.3g})")
        lines.append(f"knowing only how common each token is would give {result.unigram_entropy:.3f}")
    lines += [f"curves: {picture}"] if picture else []
    lines.append(f"weights: {result.export}")
    model = f'"model={{path: {result.folder}, dtype: {recipe.model.dtype}}}"'
    lines.append(f"go on from there: tunix run {result.folder}/recipe.yaml {model} output={result.folder}-next")
    return "\n".join(lines)
