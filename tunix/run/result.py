"""The result of a finished run: its metrics, samples and export, and their summary."""

import shlex
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


def summary(result: RunResult, recipe: Recipe, picture: Path | None) -> list[str]:
    """The final lines of a run or a stage: what was reached, and where the curves and the weights are.

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
    return [*lines, f"weights: {result.export}"]


def next_commands(recipe: Recipe, run: Path, *, chats: bool) -> list[str]:
    """What people do next with a finished run: the commands that work for it, a line each.

    Args:
        recipe: of the last stage.
        run: the run folder.
        chats: whether the model has a tokenizer; one that was trained on token ids alone cannot chat.
    """
    name = shlex.quote(str(run))
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    commands = {
        f"tunix chat {name}": "talk with it" if chats and recipe.algorithm.has_lm_head else None,
        f"tunix eval {name}": "measure it on its held-out rows" if held_out else None,
        f"tunix eval {name} ROWS": None if held_out else "measure it on rows of yours",
        f"tunix export {name} OUT": "a folder for transformers and vLLM",
    }
    width = max(len(command) for command, use in commands.items() if use)
    return ["next:", *(f"  {command:<{width}}  {use}" for command, use in commands.items() if use)]
