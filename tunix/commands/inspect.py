"""`tunix inspect`: prints rendered examples with trained tokens marked, and the accounting of all rows.

Rows are rendered by the code that a run uses (`run.inputs`, `data.examples`, `data.packing`), so what is shown is what
is trained. Episodes of an environment are played by the code that collects rollouts, with typed turns in place of the
model's (`Typed`). On a terminal the trained tokens are green and the others dim; elsewhere trained tokens are in [[ ]].
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from tunix.config import RowKind
from tunix.data.examples import Examples, to_example
from tunix.data.pipeline import Cutter, Groups, Layout, prompt_of
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import CUT_AWAY, Dropped, Kept
from tunix.errors import UserError
from tunix.protocols import SamplingClient
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Scored, sequence_of
from tunix.run.inputs import open_inputs
from tunix.run.setup import algorithm_of, layout
from tunix.types import Completion, OnDone, Reply, Request, Restart

ACCOUNTED = 5000
"""Maximum rows that the accounting reads, so that a large data set takes only seconds."""
LISTED = 20
"""Maximum rows behind the printed ones of which it is told what was refused or left out."""


PLACEHOLDER = "an answer"
"""Stands for the model's turn where a row has no answer and no turns are typed."""


def show(recipe: Recipe, rows: int | None = None, console: Console | None = None, *, actions: List[str] = ()) -> None:
    """Prints the first examples (4, or 3 episodes of an environment) and the accounting of each stage of a recipe.

    The model's turns in every episode are the `actions`; without any the row's answer, or `PLACEHOLDER`.

    Raises:
        UserError: the data or the tokenizer is missing, a row does not fit, no environment is there for the actions.
    """
    console = console or Console(highlight=False, emoji=False)
    kinds = [x.row_kind for x in recipe.stages or (recipe,)]
    if actions and RowKind.ROW not in kinds:
        raise UserError(f"--actions {actions[0]!r}: the recipe has no rollout.environment that would answer them")
    for stage in recipe.stages or (recipe,):
        if recipe.stages:
            console.print(f"stage {stage.output}\n", markup=False)
        # The model of a later stage does not exist yet; its tokenizer is that of the first stage.
        run = stage.model_copy(update={"model": recipe.model})
        with tempfile.TemporaryDirectory() as folder:
            inputs = open_inputs(run, Path(folder))
            algorithm = algorithm_class(run.algorithm.name)(run.algorithm)
            whole = Examples(inputs.train, inputs.tokenizer, run.data, run.row_kind)
            packed = None if run.algorithm.reads == RowKind.PROMPT else layout(algorithm)
            total = sum(source.weight for source in run.data.sources)
            for examples in whole.parts or [whole]:
                part = run
                for source in (source for source in run.data.sources if source.name == examples.source):
                    share = f"{source.weight:g} of {total:g} rows that are read"
                    console.print(f"{source.name}: {share}\n", style="bold", markup=False)
                    environment = source.environment or run.rollout.environment
                    rollout = run.rollout.model_copy(update={"environment": environment})
                    part = run.model_copy(update={"rollout": rollout, "reward": source.reward or run.reward})
                shown = rows or (3 if examples.train_on == RowKind.ROW else 4)
                seen, episodes = list(examples.first(max(shown, ACCOUNTED))), dict[int, Scored]()
                environment = part.rollout.environment
                if environment is not None and environment.agent is not None:
                    console.print("An agent's episodes need a model; its rows are shown\n", markup=False)
                elif examples.train_on == RowKind.ROW and inputs.tokenizer is not None:
                    episodes = _episodes(part, inputs.tokenizer, seen[:shown], actions)
                _show_rows(examples, seen, shown, episodes, run.batch_size, packed, console)


def _show_rows(
    examples: Examples,
    seen: list[Kept | Dropped],
    shown: int,
    episodes: Mapping[int, Scored],
    batch_size: int,
    packed: Layout | None,
    console: Console,
) -> None:
    """Prints the first examples of a data set, each in the pieces that batches in file order cut it into; its
    accounting, packed by batch as in a run (prompts alone are not packed), as a table whose counts add up: rows = kept
    + dropped, and dropped rows by reason; and what of further rows was refused or left out."""
    rows, config, settings = examples.rows, examples.config, examples.settings
    cut, taken = Cutter(config, settings.train_on), 0
    cut.new_batch()
    for index, example in enumerate(seen[:shown]):
        parts: list[Kept | Dropped] = []
        finished = False
        while not finished:
            if taken and taken % batch_size == 0 and cut.has_target(example):
                cut.new_batch()
            piece, _, finished = cut.take(example)
            if piece:
                parts.append(piece)
                taken += 1
        parts = parts or [example if isinstance(example, Dropped) else Dropped(CUT_AWAY)]
        for part, piece in enumerate(parts, start=1):
            place = f"{index + 1}, piece {part} of {len(parts)}" if len(parts) > 1 else str(index + 1)
            _show_example(place, piece, examples, console, episodes.get(index))
        for rule, text in _lost(examples, index, example):
            said = isinstance(example, Dropped)
            console.print(text if said else f"{rule}: {text}", markup=False, soft_wrap=True)
        console.print()

    tokens, trained, packed_rows, empty = 0, 0, 0, 0
    groups = Groups(seen, Cutter(config, settings.train_on), batch_size)
    for group, _ in groups:
        sequences = [sequence for kept in group for sequence in kept.sequences]
        tokens += sum(len(sequence.tokens) for sequence in sequences)
        trained += sum(int(np.count_nonzero(sequence.loss_mask)) for sequence in sequences)
        if packed:
            batch = packed.packed(group, batch_size, config, groups.accounting).batch
            packed_rows += len(batch.tokens)
            empty += int(np.count_nonzero(batch.segment_ids == 0))  # positions without a token
    account = groups.accounting
    some = f"The first {account.rows:,} of {len(rows):,}" if account.rows < len(rows) else "All"
    console.print(f"{some} rows of {rows.name}:", markup=False)
    # Rows that are too long: how many were truncated, or into how many pieces they were cut.
    cuts = [("    truncated", account.truncated, f"cut at {_limit(settings)} tokens")]
    if config.turns == "each":
        cuts.append(("    turns", account.pieces, "each a sequence of a batch"))
    if settings.uncut:
        cuts = [
            ("    pieces", account.pieces, f"of at most {config.max_length} tokens, each a sequence of a batch"),
            ("    left out", account.untrained, "pieces with nothing to train on"),
        ]
    lines = [
        ("rows", account.rows, ""),
        ("  kept", account.kept, ""),
        *cuts,
        ("  dropped", sum(account.dropped.values()), ""),
        *(("   ", count, reason) for reason, count in sorted(account.dropped.items())),
        *(("  with notes" if n == 0 else "", count, rule) for n, (rule, count) in enumerate(account.notes.items())),
        ("tokens", tokens, "of the kept rows"),
    ]
    if packed and packed_rows:
        length = packed.length(config)
        lines.append(("  trained", trained, f"{trained / tokens:.1%} of them"))
        lines.append(("packed rows", packed_rows, f"of {length} tokens, {empty / (packed_rows * length):.1%} empty"))
    for name, count, note in lines:
        console.print(f"  {name:<14}{count:>12,}  {note}".rstrip(), markup=False)
    rest = enumerate(seen[shown:], start=shown)
    lost = ((i, rule, text) for i, example in rest for rule, text in _lost(examples, i, example))
    for count, (i, rule, text) in enumerate(lost):
        if count == LISTED:
            console.print(f"and so on; --rows {len(seen)} shows all", markup=False)
            break
        console.print(f"row {i + 1}: {rule}: {text}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Typed(SamplingClient):
    """A sampler without a model: turns that were typed stand for those that it would sample."""

    tokenizer: Tokenizer
    turns: List[List[str]]
    """The texts of each episode's turns."""

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Implements `protocols.SamplingClient.run`; an episode that goes on after its last turn is `paused`."""
        assert reply is not None
        completions = list[Completion]()
        for number, request in enumerate(requests):
            # A turn ends as the model's: by a stop string, or the stop token that the prompt's turns end with.
            stop = next((x for x in reversed(self.tokenizer.stop_ids) if x in request.prompt), self.tokenizer.eos_id)
            tokens, turns, sampling = np.zeros(0, np.int32), tuple[tuple[int, int], ...](), request.sampling
            observation, restarts, cut = tokens, tuple[int, ...](), False
            for text in self.turns[number]:
                ids = self.tokenizer.encode_after([*request.prompt.tolist(), *tokens.tolist()], text)
                ids += [] if text.endswith(sampling.stop_strings) else [stop]
                start, cut = len(tokens), len(tokens) + len(ids) > sampling.max_tokens
                tokens = np.array([*tokens, *ids][: sampling.max_tokens], np.int32)
                turns = (*turns, (start, len(tokens)))
                so_far = Completion(tokens, np.zeros(len(tokens)), "stop", tokens * 0, sampling, turns)
                observation = None if cut else reply(number, so_far)
                if observation is None:
                    break
                if isinstance(observation, Restart):
                    restarts, observation = (*restarts, len(tokens)), observation.prompt
                tokens = np.concatenate([tokens, observation])
            finish = "length" if cut else "stop" if observation is None else "paused"
            zeros = np.zeros(len(tokens))
            completions.append(Completion(tokens, zeros, finish, tokens * 0, sampling, turns, restarts=restarts))
        return completions


def _episodes(
    recipe: Recipe, tokenizer: Tokenizer, seen: list[Kept | Dropped], actions: List[str]
) -> dict[int, Scored]:
    """The episodes of rows, by their numbers; a reward model scores none."""
    environment, reward, data = recipe.rollout.environment, recipe.reward, recipe.data
    assert environment is not None
    kept = {i: prompt_of(example) for i, example in enumerate(seen) if isinstance(example, Kept)}
    answers = [prompt.row.get("answer", prompt.row.get("completion")) for prompt in kept.values()]
    turns = [actions or [str(x) if isinstance(x, str | int | float) else PLACEHOLDER] for x in answers]
    one_worker, history = environment.model_copy(update={"workers": 1}), recipe.rollout.history
    play = Player(one_worker, tokenizer, data.template_kwargs, history=history)
    sampling = algorithm_of(recipe, tokenizer.stop_ids, play.stop_strings).sampling
    scorer = Scorer(reward.functions, reward.deadline, 1) if reward and reward.functions else None
    with closing(Collector(tokenizer, sampling, scorer, play, data.max_length)) as collector:
        groups = collector.collect(Typed(tokenizer, turns), list(kept.values()), 1, seed=recipe.seed)
    return dict(zip(kept, (episode for (episode,) in groups), strict=True))


def _show_example(
    number: str, example: Kept | Dropped, examples: Examples, console: Console, episode: Scored | None = None
) -> None:
    """Prints one example: the counts of its sequences, and their texts with trained tokens marked, ids where there is
    no tokenizer; of an episode its rewards too, and how it ended."""
    settings, tokenizer = examples.settings, examples.tokenizer
    if isinstance(example, Dropped):
        console.print(f"row {number}: dropped, {example.reason}", style="bold", markup=False)
        return
    if settings.train_on == RowKind.ROW:
        console.print(f"row {number}: for the environment\n{json.dumps(dict(example.row), default=str)}", markup=False)
        if episode is None:
            return
        example = replace(example, sequences=(sequence_of(episode.prompt, episode.completion),))
    coloured = console.color_system is not None and not console.no_color  # on a terminal without NO_COLOR
    sides = ("chosen: ", "rejected: ") if settings.train_on == RowKind.PAIRS else ("",)
    for side, sequence in zip(sides, example.sequences, strict=True):
        size = len(sequence.tokens)
        notes = [f"{size} tokens", f"{int(sequence.loss_mask.sum())} trained"]
        notes += [f"cut at {_limit(settings)}"] if example.truncated and size == _limit(settings) else []
        notes += [f"weight {sequence.weight:g}"] if sequence.weight != 1 else []
        notes += [f"{name} {value:g}" for name, value in sequence.per_sequence.items()]
        console.print(f"row {number}: {side}{', '.join(notes)}", style="bold", markup=False)
        text, before = Text(), []
        for trained, group in itertools.groupby(range(size), key=lambda t: bool(sequence.loss_mask[t])):
            ids = sequence.tokens[list(group)]
            words = _text(ids, tokenizer, before)
            before = ids.tolist()
            if coloured:
                text.append(words, "bold green" if trained else "dim")
            else:
                text.append(f"[[{words}]]" if trained else words)
            if tokenizer is None:
                text.append(" ")
        console.print(text, soft_wrap=episode is None)
    if episode is not None:
        rewards = ", ".join(f"{name} {x:g}" for name, x in episode.rewards.items() if name not in episode.failures)
        number_of_turns = len(episode.completion.turns)
        turns = f"{number_of_turns} turn{'s' * (number_of_turns > 1)}"
        by_turn = f" ({', '.join(f'{x:g}' for x in episode.turn_rewards)} by turn)" if number_of_turns > 1 else ""
        ends = {"stop": f"ended after {turns}", "paused": f"not ended after {turns}: type more, --actions"}
        ends["length"] = f"cut off at {settings.data.longest_completion} tokens, data.completion_length"
        end = "; ".join(["failed", *episode.failures.values()]) if episode.failures else ends[episode.completion.finish]
        console.print(f"reward: {rewards or 'none'}{by_turn}; {end}", style="bold", markup=False)


def _lost(examples: Examples, index: int, example: Kept | Dropped) -> Iterator[tuple[str, str]]:
    """Yields each rule by which a row was refused or shortened, and the text that it is about."""
    rows, tokenizer, settings = examples.rows, examples.tokenizer, examples.settings
    if isinstance(example, Dropped):
        shown = example.detail or _shortened(json.dumps(rows[index], ensure_ascii=False, default=str))
        yield f"dropped, {example.reason}", shown
        return
    if example.truncated and settings.turns != "each":  # of turns a note says it
        whole = to_example(rows[index], tokenizer, replace(settings, uncut=True), folder=rows.folder)
        assert isinstance(whole, Kept), "it was kept before"
        for cut, uncut in zip(example.sequences, whole.sequences, strict=True):
            size = len(cut.tokens)
            away = uncut.tokens[:-size] if settings.train_on == RowKind.PROMPT else uncut.tokens[size:]
            if len(away):
                yield f"cut at {_limit(settings)}", _shortened(_text(away, tokenizer))
    yield from ((note.rule, _shortened(note.text)) for note in example.notes)


def _text(tokens: np.ndarray, tokenizer: Tokenizer | None, before: list[int] | None = None) -> str:
    """The text of tokens, which others may come before; ids where there is no tokenizer."""
    return tokenizer.decode(tokens, previous=before or []) if tokenizer else " ".join(map(str, tokens))


def _shortened(text: str) -> str:
    """The beginning and the end of a text, on a line."""
    words = text.replace("\n", "\\n")
    return words if len(words) <= 120 else f"{words[:70]} ... {words[-45:]}"


def _limit(settings: Rendering) -> int:
    """The maximum tokens of a sequence, or of a prompt alone."""
    data = settings.data
    return data.longest_prompt if settings.train_on == RowKind.PROMPT else data.max_length
