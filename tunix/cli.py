"""The command line: words in, one call into the room that does the work, an exit code out.

0 is done; 2 a mistake that the user can mend, told in a sentence; 130 interrupted. Anything else is a defect of ours
and shows its traceback. Nothing heavy is imported before a command needs it. `COMMANDS` at the end is the table of what
there is.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tunix import __version__
from tunix.errors import Interrupted, UserError, nearest

Parsed = argparse.Namespace


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are `UserError`s that name the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Raises what `main` prints, instead of leaving on the spot."""
        options = [option for action in self._actions for option in action.option_strings]
        wrong = [word for word in message.split() if word.startswith("--") and word not in options]
        hint = nearest(wrong[0], options) if wrong else ""
        raise UserError(f"{message}.{hint} `{self.prog} --help` shows how it is called")


@dataclass(frozen=True)
class Command:
    """One command of the table."""

    summary: str
    """A line for the overview."""
    example: str
    """A complete call."""
    arguments: Callable[[_Parser], None]
    """Declares its arguments."""
    execute: Callable[[Parsed], None]
    """Does the work; imports what it needs."""


def entry() -> NoReturn:
    """The console script."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has left: whatever is still buffered goes nowhere, also at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `tunix`; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UserError as error:
        if os.environ.get("TUNIX_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    """Finds the command that the first word names, and runs it with the others.

    Raises:
        UserError: there is no such command, or its arguments do not fit.
    """
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
    elif name == "--version":
        print(f"tunix {__version__}")
    elif name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f" There are {', '.join(COMMANDS)}."
        raise UserError(f"{name!r} is no command.{hint}")
    else:
        command = COMMANDS[name]
        parser = _Parser(
            f"tunix {name}", description=command.summary, epilog=f"example: {command.example}", allow_abbrev=False
        )
        command.arguments(parser)
        # Intermixed, so that overrides and options may follow each other in any order.
        command.execute(parser.parse_intermixed_args(words[1:]))
    return 0


def _overview() -> str:
    """The text of `tunix --help`."""
    rows = "\n".join(f"  {name:<9}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: tunix COMMAND ...

Post-training of language models, from a recipe in YAML.

commands:
{rows}

examples:
  tunix run recipes/quickstart.yaml
  tunix run recipes/sft_gemma.yaml optimizer.learning_rate=1e-5 output=runs/slower
  tunix run recipes/sft_gemma.yaml --tiny      on a laptop, without a download

`tunix COMMAND --help` says more. Exit codes: 0 done, 2 a mistake in what was asked, 130 interrupted."""


def _recipe_arguments(parser: _Parser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, or the name of one that tunix brings")
    replaces = "replaces a value of the recipe, e.g. optimizer.learning_rate=1e-5"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=replaces)
    parser.add_argument("--tiny", action="store_true", help="a two-layer random model and a few made rows: no download")


def _run_arguments(parser: _Parser) -> None:
    _recipe_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="start again even where the run folder could be resumed")


def _inspect_arguments(parser: _Parser) -> None:
    _recipe_arguments(parser)
    parser.add_argument("--rows", type=_count, default=4, metavar="N", help="examples to show (4)")


def _score_arguments(parser: _Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    parser.add_argument("data", metavar="DATA", help=".jsonl with rows of text, messages or input_ids")
    writes = ".jsonl to write: logprobs, tokens and sum of each row"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=writes)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter on top of the model")
    parser.add_argument("--batch-size", type=_count, default=8, metavar="N", help="rows per pass (8)")
    parser.add_argument("--max-length", type=_count, default=1024, metavar="N", help="tokens of a row at most (1024)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the computation (float32)")


def _export_arguments(parser: _Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; nothing that exists is overwritten")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as a PEFT folder")
    parser.add_argument("--step", type=_count, metavar="N", help="of which checkpoint; the last one by default")


def _count(text: str) -> int:
    """A positive whole number, for argparse."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _run(parsed: Parsed) -> None:
    from tunix.recipe import Recipe

    Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny).run(fresh=parsed.fresh)


def _check(parsed: Parsed) -> None:
    from tunix.recipe import Recipe

    print(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny).to_yaml(), end="")
    print(f"# ok: {parsed.recipe}")  # a comment, so that the output is a recipe again


def _inspect(parsed: Parsed) -> None:
    from tunix.recipe import Recipe
    from tunix.show import show

    show(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), parsed.rows)


def _score(parsed: Parsed) -> None:
    from tunix.score import score

    score(
        parsed.model,
        parsed.data,
        parsed.out,
        adapter=parsed.adapter,
        batch_size=parsed.batch_size,
        max_length=parsed.max_length,
        dtype=parsed.dtype,
    )


def _export(parsed: Parsed) -> None:
    from tunix.run import export

    export(parsed.run, parsed.out, adapter=parsed.adapter, step=parsed.step)


COMMANDS = {
    "run": Command(
        "train; goes on by itself where the run folder holds the same recipe",
        "tunix run recipes/sft_gemma.yaml steps=100 --tiny",
        _run_arguments,
        _run,
    ),
    "check": Command(
        "validate a recipe and print it with every value resolved",
        "tunix check recipes/sft_gemma.yaml optimizer.name=lion",
        _recipe_arguments,
        _check,
    ),
    "inspect": Command(
        "show rendered examples, what is trained on, and the accounting of the rows",
        "tunix inspect recipes/quickstart.yaml --rows 3",
        _inspect_arguments,
        _inspect,
    ),
    "score": Command(
        "per-token log-probs of given rows, and their perplexity",
        "tunix score google/gemma-3-1b-it rows.jsonl --out scores.jsonl",
        _score_arguments,
        _score,
    ),
    "export": Command(
        "write a run's weights as a Hugging Face folder or a PEFT adapter",
        "tunix export runs/quickstart exported",
        _export_arguments,
        _export,
    ),
}


if __name__ == "__main__":
    entry()
