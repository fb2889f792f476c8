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
from typing import TYPE_CHECKING, NoReturn

from tunix import __version__
from tunix.errors import Interrupted, UserError, nearest

if TYPE_CHECKING:
    from tunix.generate import Judged
    from tunix.speaker import Asked
    from tunix.types import Sampling

Parsed = argparse.Namespace
DTYPES = ("float32", "bfloat16")


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
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


def _generate_arguments(parser: _Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    sent = (
        "text to answer: sent as a user's message where the tokenizer has a chat template, as it stands where it has "
        "none, or where the model is a run that was trained on plain strings; so are the strings of --input"
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=sent)
    reads = ".jsonl with a row for each prompt: `prompt`, `messages` or `input_ids`"
    parser.add_argument("--input", metavar="FILE", help=reads)
    writes = (
        ".jsonl to write, an object for each completion: row (from 0), sample, what the row asked with, tokens, text, "
        "logprobs, finish"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=writes)
    parser.add_argument("--n", type=_count, default=1, metavar="N", help="completions of each prompt (1)")
    slots = "completions drawn at a time: more memory, more speed, the same result"
    parser.add_argument("--slots", type=_count, metavar="N", help=slots)
    _reward_arguments(parser)
    best = "write rows to train on instead: the K best completions of each prompt (1), of equals the first"
    parser.add_argument("--best", type=_count, nargs="?", const=1, metavar="K", help=best)
    least = "write rows to train on instead: the completions that are worth at least X; also with --best"
    parser.add_argument("--threshold", type=float, metavar="X", help=least)
    _sampling_arguments(parser, max_tokens=256)


def _reward_arguments(parser: _Parser) -> None:
    judges = (
        "scores each completion: a shipped reward, file.py:function or module:function, options behind it "
        "('length target=40 width=20'), or an entry of a recipe ('{name: number, columns: {answer: solution}}'); "
        "may be given several times"
    )
    parser.add_argument("--reward", action="append", default=[], metavar="REWARD", help=judges)
    model = "hub id, folder or run of a reward model that scores each completion"
    parser.add_argument("--reward-model", metavar="MODEL", help=model)
    parser.add_argument("--deadline", type=float, default=10.0, metavar="S", help="seconds of a reward's call (10)")


def _chat_arguments(parser: _Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    _sampling_arguments(parser, max_tokens=1024)


def _sampling_arguments(parser: _Parser, max_tokens: int) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    raw = "send text as it stands, also where there is a chat template"
    parser.add_argument("--raw", action="store_true", help=raw)
    most = f"tokens of an answer at most ({max_tokens})"
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=most)
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1.0)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens; 0 for all (0)"
    )
    mass = "only the most likely tokens that together reach P; 1 for all (1.0)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=mass)
    share = "only tokens at least P times as likely as the likeliest (0.0)"
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help=share)
    stop = "ends an answer, and is left out of its text; may be given several times"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the draws: the same gives the same (0)")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter on top of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


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


def _seed(text: str) -> int:
    """A seed, for argparse."""
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
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


def _generate(parsed: Parsed) -> None:
    from tunix.generate import generate

    generate(
        _asked(parsed, parsed.slots),
        parsed.prompt,
        rows=parsed.input,
        out=parsed.out,
        sampling=_sampling(parsed),
        n=parsed.n,
        seed=parsed.seed,
        judging=_judged(parsed),
    )


def _judged(parsed: Parsed) -> "Judged | None":
    """How completions are scored and chosen."""
    from tunix.generate import Judged
    from tunix.judging import reward_config

    rewards = reward_config(parsed.reward, parsed.reward_model, parsed.deadline)
    if rewards is not None:
        return Judged(rewards, parsed.best, parsed.threshold)
    for name in ("best", "threshold"):
        if vars(parsed)[name] is not None:
            raise UserError(f"--{name} chooses by what completions are worth: say --reward, for instance exact_match")
    return None


def _chat(parsed: Parsed) -> None:
    from tunix.chat import chat

    chat(_asked(parsed, slots=1), sampling=_sampling(parsed), seed=parsed.seed)


def _asked(parsed: Parsed, slots: int | None) -> "Asked":
    from tunix.speaker import Asked

    return Asked(parsed.model, parsed.adapter, parsed.dtype, slots, parsed.system, parsed.raw)


def _sampling(parsed: Parsed) -> "Sampling":
    from tunix.types import Sampling

    return Sampling(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        min_p=parsed.min_p,
        stop_strings=tuple(parsed.stop),
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
    "generate": Command(
        "answer a prompt, or a file of them",
        'tunix generate google/gemma-3-1b-it "Why is the sky blue?" --temperature 0',
        _generate_arguments,
        _generate,
    ),
    "chat": Command(
        "talk with a model",
        "tunix chat runs/sft_gemma --system 'Answer in one sentence.'",
        _chat_arguments,
        _chat,
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
