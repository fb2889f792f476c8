"""The command line: declares and parses the arguments of a command, calls what implements it, returns an exit code.

Exit code 0 is success, 2 a user error or a file that the system refuses, reported in a sentence, 75 the loss of another
process of the run (`distributed/meeting.py`), 130 an interruption. Any other exception is a defect of tunix and shows
its traceback. Nothing heavy is imported before a command needs it. `COMMANDS` at the end is the table of commands.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tunix import __version__
from tunix.errors import Interrupted, UserError, install_command, nearest
from tunix.util.atomic_io import ROOM, is_full

Parsed = argparse.Namespace
Result = TypeVar("Result")
EXPORT_OPTIONS = {
    "adapter": "huggingface",
    "packed": "huggingface",
    "unscanned": "maxtext",
    "batch": "stablehlo",
    "prompt_length": "stablehlo",
    "length": "stablehlo",
}
"""Options of `tunix export` -> the format that has them."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` and suggests the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`, which `main` prints, instead of exiting."""
        options = [option for action in self._actions for option in action.option_strings]
        wrong = [word for word in message.split() if word.startswith("--") and word not in options]
        hint = nearest(wrong[0], options) if wrong else ""
        raise UserError(f"{message}.{hint} `{self.prog} --help` shows how it is called")


Argument = Callable[[Parser], object]
"""Declares one or several arguments of a command."""


@dataclass(frozen=True)
class Command:
    """A command: its help, its arguments, and the function that runs it."""

    summary: str
    """One line for `tunix --help`."""
    example: str
    """A complete call, for the help of the command."""
    arguments: Argument
    """Its arguments."""
    execute: Callable[[Parsed], None]
    """Runs the command; imports the modules that it needs."""

    def parsed(self, name: str, words: Sequence[str]) -> Parsed:
        """The arguments of a call of the command by this name; raises UserError where they do not fit."""
        example = f"example: {self.example}"
        parser = Parser(f"tunix {name}", description=self.summary, epilog=example, allow_abbrev=False)
        self.arguments(parser)
        # Intermixed, so that overrides and options may follow each other in any order.
        return parser.parse_intermixed_args(words)


def entry() -> NoReturn:
    """Entry point of the console script `tunix`."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe: buffered output is discarded, also at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after `tunix`; those of the process by default.

    Returns:
        The exit code.
    """
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if name in ("-h", "--help", "help"):
            rows = "\n".join(f"  {name:<9}{command.summary}" for name, command in COMMANDS.items())
            print(OVERVIEW.format(commands=rows))
        elif name == "--version":
            print(f"tunix {__version__}")
        elif name not in COMMANDS:
            hint = nearest(name, COMMANDS) or f" There are {', '.join(COMMANDS)}."
            raise UserError(f"{name!r} is no command.{hint}")
        else:
            COMMANDS[name].execute(COMMANDS[name].parsed(name, words))
    except UserError as error:
        if os.environ.get("TUNIX_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        full = is_full(error)
        if os.environ.get("TUNIX_DEBUG") == "1" or not (error.filename or full):
            raise
        said = f"could not be written: {error.strerror}. {ROOM}." if full else f"cannot be used: {error.strerror}"
        print(f"error: {error.filename or 'a file'} {said}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


OVERVIEW = """usage: tunix COMMAND ...

Post-training of language models, from a recipe in YAML.

commands:
{commands}

examples:
  tunix run recipes/quickstart.yaml
  tunix run recipes/sft_gemma.yaml optimizer.learning_rate=1e-5 output=runs/slower
  tunix run recipes/sft_gemma.yaml --tiny      on a laptop, without a download

`tunix COMMAND --help` says more. Exit codes: 0 done, 2 user error, 75 another process lost, 130 interrupted."""


def command(summary: str, example: str, *arguments: Argument) -> Callable[[Callable[[Parsed], None]], Command]:
    """Makes a `Command` of the function below it."""
    return partial(Command, summary, example, together(*arguments))


def together(*arguments: Argument) -> Argument:
    """Declares arguments in their order, which is that of the help."""
    return lambda parser: [declare(parser) for declare in arguments]


def value(name: str, text: str, kind: Callable[[str], Any] = str, default: Any = None, **settings: Any) -> Argument:
    """Declares an argument or an option with a value, as `--name METAVAR`; `settings` are further ones of argparse."""
    flag, _, metavar = name.partition(" ")
    return lambda parser: parser.add_argument(
        flag, metavar=metavar or None, help=text, type=kind, default=default, **settings
    )


def values(name: str, text: str, kind: Callable[[str], Any] = str) -> Argument:
    """Declares an option that may be given several times."""
    return value(name, f"{text}; may be given several times", kind, [], action="append")


def switch(*names: str, text: str) -> Argument:
    """Declares an option without a value."""
    return lambda parser: parser.add_argument(*names, action="store_true", help=text)


def count(text: str) -> int:
    """A positive whole number, for argparse."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """A seed, for argparse."""
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


# Arguments that several commands have.
RECIPE = together(
    value("recipe RECIPE", "YAML file, or the name of one that tunix brings", Path),
    value("overrides section.key=value", "replaces a value, e.g. optimizer.learning_rate=1e-5", nargs="*", default=[]),
    switch("--tiny", text="a two-layer random model, and generated rows for those of the hub: no download"),
)
MODEL = value("model MODEL", "hub id, folder, or the folder of a run")
NEW_FOLDER = value("out OUT", "folder to write; nothing that exists is overwritten", Path)
ADAPTER = value("--adapter DIR", "PEFT adapter on top of the model", Path)
DTYPES = ("float32", "bfloat16")
DTYPE = value("--dtype", "of the computation (float32)", choices=DTYPES, default="float32")
PACKED = switch(
    "--packed",
    text="write rounded weights in few bits (compressed-tensors, which transformers and vLLM read); not for nf4",
)
VERBOSE = switch(
    "-v",
    "--verbose",
    text="also say how it is computed: kernels, memory, rematerialization, libraries' warnings (always in log.txt)",
)
NO_PLAN = switch("--no-plan", text="do not compile the programs first to see whether they fit (`tunix plan`)")
REWARDS = together(
    values(
        "--reward REWARD",
        "scores each completion: a built-in reward, file.py:function or module:function, followed by options "
        "('length target=40 width=20'), or an entry of a recipe ('{name: number, columns: {answer: solution}}')",
    ),
    value("--reward-model MODEL", "hub id, folder or run of a reward model that scores each completion"),
    value("--deadline S", "maximum seconds of a reward's call (10)", float, 10.0),
)
DRAFTS = together(
    value(
        "--speculate N",
        "draft tokens of each step, 7 at most: they change no answer, and save time where they are right (0)",
        int,
        0,
        choices=range(8),
    ),
    switch(
        "--mtp", text="the model's own head drafts them (Qwen 3.5's mtp.*), not what followed the same tokens before"
    ),
)
PROMPTS = together(
    value("--system TEXT", "system message of the chat"),
    switch("--raw", text="send text as it stands, also where there is a chat template"),
    values("--stop TEXT", "ends an answer, and is left out of its text"),
    value("--seed N", "of the sampling: the same seed gives the same answers (0)", seed, 0),
    DRAFTS,
    DTYPE,
)


def filled(function: Callable[..., Result], parsed: Parsed, **others: Any) -> Result:
    """Calls a function, or makes a record: each parameter is the option of its name, unless `others` has it; of several
    values a tuple."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(parsed).items()}
    named = signature(function).parameters.keys() & options.keys() - others.keys()
    return function(**{name: options[name] for name in named}, **others)


def slots(what: str) -> Argument:
    """Declares how many of something are computed at a time."""
    return value("--slots N", f"{what} at a time: more memory, more speed, the same result", count)


def sampling(max_tokens: int) -> Argument:
    """Declares how answers are sampled: the fields of `Sampling`."""
    return together(
        value("--max-tokens N", f"maximum tokens of an answer ({max_tokens})", int, max_tokens),
        value("--temperature T", "0 is greedy (1.0)", float, 1.0),
        value("--top-k K", "only the K most likely tokens; 0 for all (0)", int, 0),
        value("--top-p P", "only the most likely tokens that together reach P; 1 for all (1.0)", float, 1.0),
        value("--min-p P", "only tokens at least P times as likely as the likeliest (0.0)", float, 0.0),
        PROMPTS,
    )


@command(
    "train; resumes where the run folder holds the same recipe",
    "tunix run recipes/sft_gemma.yaml steps=100 --tiny",
    RECIPE,
    switch("--fresh", text="start again even where the run folder could be resumed"),
    value("--minutes N", "stop after so many minutes, with a checkpoint; the same command goes on", count),
    VERBOSE,
    NO_PLAN,
    value(
        "--coordinator HOST:PORT",
        "address of process 0 where a run has several processes, e.g. 10.0.0.1:8476; each is given the same",
    ),
    value("--processes N", "number of processes (found by itself under SLURM, Kubernetes and on TPU pods)", count),
    value("--process I", "number of this process, from 0", int),
)
def _run(parsed: Parsed) -> None:
    from tunix.commands.plan import require_fit
    from tunix.run.opening import begin

    filled(begin, parsed, require_fit=None if parsed.tiny or parsed.no_plan else require_fit)


@command(
    "write a recipe for a model and rows of yours, with the reason for each value",
    "tunix init models/qwen rows.jsonl --on h100:1",
    value("model MODEL", "model folder, run, or hub id that was downloaded before"),
    value("data DATA", ".jsonl, .csv, .parquet, folder, hub id or file.py:function, as in data.train"),
    value(
        "--algorithm",
        "by default what the columns are for",
        choices=("sft", "dpo", "reward", "kto", "grpo"),
    ),
    value("--on CHIP:SHAPE", "devices that it has to fit, as --topology of `tunix plan`, e.g. h200:1 (those at hand)"),
    value("--out FILE", ".yaml to write (ALGORITHM_MODEL.yaml); nothing is overwritten", Path),
)
def _init(parsed: Parsed) -> None:
    from tunix.commands.init import init

    print(init(parsed.model, parsed.data, parsed.out, parsed.algorithm, parsed.on))


@command(
    "validate a recipe with its rows, rewards and folders, and print what it says",
    "tunix check recipes/sft_gemma.yaml optimizer.name=lion --all",
    RECIPE,
    switch("--all", text="print every value, also those that were filled in"),
)
def _check(parsed: Parsed) -> None:
    from tunix.commands.check import check

    print(check(parsed.recipe, parsed.overrides, tiny=parsed.tiny, everything=parsed.all), end="")


@command("list the recipes that tunix brings, the measured ones first", "tunix recipes | less")
def _recipes(_: Parsed) -> None:
    import shutil

    from tunix.commands.check import recipe_lines

    print("\n".join(recipe_lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))


@command(
    "say what this machine can run and what is missing; exit code 1 where something is",
    "tunix doctor && tunix run quickstart",
)
def _doctor(_: Parsed) -> None:
    from tunix.commands.doctor import doctor

    if not doctor():
        raise SystemExit(1)


@command(
    "what a recipe needs of devices that need not be here, by their compilers",
    "tunix plan recipes/sft_gemma.yaml --topology h100:1",
    RECIPE,
    values(
        "--topology CHIP:SHAPE",
        "devices that need not be here, e.g. v5e:4x4, v5p:8x8x8, v6e:16x16, h100:8, h200:1 (those at hand)",
    ),
    value("--deadline S", "maximum seconds of each plan (600)", float, 600.0),
    switch("--json", text="print everything as JSON"),
)
def _plan(parsed: Parsed) -> None:
    from tunix import Recipe
    from tunix.commands.plan import plan

    recipe = Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny)
    plan(recipe, parsed.topology or [None], parsed.deadline, as_json=parsed.json)


@command(
    "write the job of a recipe for SLURM, GKE or Pathways",
    "tunix launch recipes/sft_llama_70b.yaml --target slurm --topology h100:256 --dry-run",
    RECIPE,
    value(
        "--target", "scheduler that the job is for", choices=("slurm", "gke-tpu", "gke-gpu", "pathways"), required=True
    ),
    value(
        "--topology CHIP:SHAPE",
        "devices of the job, as in `tunix plan`: h100:16, v5e:4x4; the number may be left out where mesh has it",
    ),
    value("--slices N", "slices of TPUs, each of --topology (1)", count, 1),
    value("--per-host N", "devices of a host, each of which runs one process (8 GPUs, 4 TPUs)", count),
    value("--name NAME", "name of the job (that of the run folder)"),
    value("--restarts N", "maximum number of restarts (20)", count, 20),
    value("--grace S", "seconds between SIGTERM and SIGKILL, in which a checkpoint is written (120)", count, 120),
    values(
        "--secret VARIABLE=WHERE",
        "variable for the run whose value is not written down: HF_TOKEN=hf/token, a Secret and its key; on SLURM a "
        "file, HF_TOKEN=~/.hf_token",
    ),
    # What becomes of the file.
    value("--out FILE", "file to write (NAME.sbatch or NAME.yaml)", Path),
    switch("--overwrite", text="replace the file where there is another one"),
    switch("--dry-run", text="print the file, and write nothing"),
    switch("--submit", text="submit what was written, by sbatch or kubectl apply"),
    VERBOSE,
    NO_PLAN,
    # What single schedulers need.
    value("--image IMAGE", "Kubernetes: container image with tunix in it"),
    values("--mount CLAIM:/PATH", "Kubernetes: a PersistentVolumeClaim that all pods may write"),
    value("--namespace NAME", "Kubernetes: namespace (that of kubectl's context)"),
    value("--service-account NAME", "Kubernetes: service account of the pods, for access to gs://"),
    value("--pathways-dir URL", "Pathways: folder for its own files, gs://BUCKET/FOLDER"),
    values("--setup LINE", "SLURM: line of shell before the run, e.g. 'source ~/tunix/bin/activate'"),
    values("--sbatch OPTION", "SLURM: option of sbatch, e.g. partition=gpu, time=04:00:00"),
)
def _launch(parsed: Parsed) -> None:
    from tunix import Recipe
    from tunix.commands.plan import refuse_misfit
    from tunix.launch.submit import Options, launch, mount_of

    secrets = tuple(secret.partition("=")[::2] for secret in parsed.secret)
    options = filled(Options, parsed, mounts=tuple(map(mount_of, parsed.mount)), secrets=secrets)
    recipe = Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny)
    filled(launch, parsed, recipe=recipe, options=options, refuse_misfit=None if parsed.no_plan else refuse_misfit)


@command(
    "show rendered examples, their trained tokens, and the accounting of the rows",
    "tunix inspect recipes/quickstart.yaml --rows 3",
    RECIPE,
    value("--rows N", "examples to show (4, or 3 episodes of an environment)", count),
    value(
        "--actions TEXT",
        "turns that are typed in place of the model's, in every episode (the row's answer, if it has one)",
        nargs="+",
        default=[],
    ),
)
def _inspect(parsed: Parsed) -> None:
    from tunix import Recipe
    from tunix.commands.inspect import show

    show(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), parsed.rows, actions=parsed.actions)


@command(
    "what a run's profile says of kernels, or what a step spent its time on, as a chart",
    "tunix trace runs/grpo_gemma 12",
    value("run RUN", "run folder", Path),
    value(
        "step STEP",
        "of a run on completions the number of a step, from 1, which is drawn for Perfetto; by default the kernels of "
        "the profile are listed (logging.profile)",
        count,
        nargs="?",
    ),
    value("--out FILE", ".json to write for a STEP (RUN/trace-STEP.json)", Path),
)
def _trace(parsed: Parsed) -> None:
    from tunix.commands.trace import profiled, trace

    if parsed.step is None:
        if parsed.out is not None:
            raise UserError("--out belongs to a STEP: a profile is printed, and its files are in RUN/profile")
        print("\n".join(profiled(parsed.run)))
        return
    print(f"{trace(parsed.run, parsed.step, parsed.out)}: open it at https://ui.perfetto.dev")


@command(
    "compute a step of a run again, compare it with what was recorded, and show its sequences, the worst first",
    "tunix replay runs/grpo_gemma 12",
    value("run RUN", "run folder, which is only read", Path),
    value("step STEP", "number of the step, from 1", count),
)
def _replay(parsed: Parsed) -> None:
    from tunix.commands.replay import replay

    if not filled(replay, parsed):
        raise SystemExit(1)


@command(
    "one HTML file about a run, or two: curves, recipes, time, samples with their tokens, alarms",
    "tunix report runs/grpo_gemma --watch",
    value("run RUN", "run folder", Path),
    value("other OTHER", "folder of a second run, which is drawn over the first", Path, nargs="?"),
    value("--out FILE", ".html to write (RUN/report.html)", Path),
    switch("--watch", text="write it again whenever the run has gone on, until Ctrl-C"),
)
def _report(parsed: Parsed) -> None:
    from tunix.commands.report import reports

    for file in filled(reports, parsed):
        print(f"{file} is written: open it in a browser", flush=True)


@command(
    "per-token log-probs of given rows, and their perplexity",
    "tunix score google/gemma-3-1b-it rows.jsonl --out scores.jsonl",
    MODEL,
    value("data DATA", ".jsonl with rows of text, messages or input_ids"),
    value("--out FILE", ".jsonl to write: logprobs, tokens and sum of each row", Path, required=True),
    ADAPTER,
    value("--batch-size N", "rows per micro-batch (8)", count, 8),
    value("--max-length N", "maximum tokens of a row (1024)", count, 1024),
    DTYPE,
    value(
        "--top-k K",
        "write rows to distil from (teacher.path: stored), with K most likely ids of each trained token, 64 at most",
        count,
        0,
    ),
)
def _score(parsed: Parsed) -> None:
    from tunix.inference.load import score

    filled(score, parsed)


@command(
    "answer a prompt, or a file of them",
    'tunix generate google/gemma-3-1b-it "Why is the sky blue?" --temperature 0',
    MODEL,
    value(
        "prompt PROMPT",
        "text to answer: sent as a user's message where the tokenizer has a chat template, as it stands where it has "
        "none, or where the model is a run that was trained on plain strings; so are the strings of --input",
        nargs="?",
    ),
    value("--input FILE", ".jsonl with a row for each prompt: `prompt`, `messages` or `input_ids`"),
    value(
        "--out FILE",
        ".jsonl to write, an object for each completion: row (from 0), sample, the row's prompt, tokens, text, "
        "logprobs, finish",
        Path,
    ),
    value("--n N", "completions of each prompt (1)", count, 1),
    values("--adapter DIR", "PEFT adapter on top of the model; of several the answers are compared", Path),
    slots("completions sampled"),
    REWARDS,
    value(
        "--best K",
        "write rows to train on instead: the K best completions of each prompt (1), of equal ones the first",
        count,
        nargs="?",
        const=1,
    ),
    value("--threshold X", "write rows to train on instead: those with a reward of X or more; also with --best", float),
    sampling(max_tokens=256),
)
def _generate(parsed: Parsed) -> None:
    from tunix import Sampling
    from tunix.commands.generate import GenerateOptions, generate
    from tunix.inference.model import InferenceOptions

    compared = parsed.adapter if len(parsed.adapter) > 1 else ()
    adapter = parsed.adapter[0] if len(parsed.adapter) == 1 else None
    sampling = filled(Sampling, parsed, stop_strings=tuple(parsed.stop))
    options = filled(GenerateOptions, parsed, sampling=sampling, adapters=compared)
    generate(filled(InferenceOptions, parsed, adapter=adapter), options)


@command(
    "measure a model on held-out rows: loss, reward, accuracy, pass@k, pairs",
    "tunix eval runs/quickstart",
    MODEL,
    value(
        "data DATA",
        ".jsonl, .csv, .parquet, folder, hub id or file.py:function, of which the split for validation or test is read "
        "unless --split names one; of a run its held-out rows, where nothing is given",
        nargs="?",
    ),
    value(
        "--task",
        "loss: of the rows' completions, and perplexity; reward: mean of the model's answers; accuracy: share of "
        "answers with a reward of --threshold or more; pass: pass@k; pairs: chosen above rejected. By default what the "
        "run or the rows are for",
        choices=("loss", "reward", "accuracy", "pass", "pairs"),
    ),
    REWARDS,
    value(
        "--environment NAME",
        "answers the model: a name as in a recipe's rollout.environment, or '{name: calculator, turns: 4}' (that of a "
        "run); one of another package brings its episodes, with a seed that is not trained on",
    ),
    value("--options YAML", "arguments of the environment, such as '{tasks: chain_sum}'"),
    value("--threshold X", "minimum reward of a right answer (1)", float),
    value("--n N", "answers to each row (1; 8 for pass)", count),
    value("--k K", "values of k for pass@k (1 and N)", count, nargs="+", default=[]),
    value(
        "--pass-at K,K",
        "measure pass@k too, of sampled answers: as many to each row as the largest k",
        lambda text: [count(part) for part in text.split(",")],
        [],
    ),
    value("--rows N", "rows from the start (all; a run's eval.rows; 64 of an environment's episodes)", count),
    value("--split NAME", "split of DATA, where it has splits"),
    values("--column OURS=THEIRS", "a column with another name, as in prompt=question"),
    value("--harness", "measures --tasks by another package, in its own numbers", choices=("lm-eval",)),
    value("--tasks FILE", "tasks of the harness: files, or names of its own", nargs="+", default=[]),
    value("--out FILE", ".json for numbers and rows, .jsonl for the rows", Path),
    value("--max-tokens N", "maximum tokens of an answer (256, or the run's)", count),
    value("--temperature T", "0 is greedy (0; for pass 1, or the run's)", float),
    slots("completions sampled"),
    ADAPTER,
    PROMPTS,
)
def _eval(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions, evaluate
    from tunix.inference.model import InferenceOptions

    columns = dict(column.partition("=")[::2] for column in parsed.column)
    if wrong := next((ours for ours, theirs in columns.items() if not (ours and theirs)), None):
        raise UserError(f"--column {wrong!r}: write ours=theirs, as in prompt=question")
    evaluate(filled(InferenceOptions, parsed), filled(EvalOptions, parsed, columns=columns), parsed.out)


@command(
    "round a model's matrices to few bits, and measure the error",
    "tunix quantize google/gemma-3-1b-it rounded --rules 'mlp.*=int4:64,.*=int8' --data rows.jsonl",
    MODEL,
    NEW_FOLDER,
    value(
        "--rules RULES",
        "MODULE=TYPE, MODULE=TYPE:TILE or MODULE=TYPE/ACTIVATIONS, separated by commas, the first that matches counts, "
        "as in 'o_proj=none,mlp.*=int4:64,.*=int8/int8'; or a .yaml file with a list `rules` (.*=int8)",
        default=".*=int8",
    ),
    value(
        "--data DATA",
        "rows that the loss is measured on, before and after; of a run its held-out rows, where nothing is given",
    ),
    value("--rows N", "rows from the start (all; a run's eval.rows)", count),
    PACKED,
    ADAPTER,
    value(
        "--dtype",
        "of the written weights and the computation (float32): bfloat16 is half as large, and no longer exact",
        choices=DTYPES,
        default="float32",
    ),
)
def _quantize(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions
    from tunix.commands.quantize import quantize
    from tunix.inference.model import InferenceOptions

    rows = EvalOptions(data=parsed.data, rows=parsed.rows)
    quantize(filled(InferenceOptions, parsed), parsed.out, parsed.rules, rows, packed=parsed.packed)


@command(
    "talk with a model",
    "tunix chat runs/sft_gemma --system 'Answer in one sentence.'",
    MODEL,
    ADAPTER,
    sampling(max_tokens=1024),
)
def _chat(parsed: Parsed) -> None:
    from tunix import Sampling
    from tunix.commands.chat import chat
    from tunix.inference.model import InferenceOptions

    sampling = filled(Sampling, parsed, stop_strings=tuple(parsed.stop))
    chat(filled(InferenceOptions, parsed, slots=1), sampling=sampling, seed=parsed.seed)


@command(
    "answer chats and completions over HTTP in OpenAI's form, also for runs that sample elsewhere than they train",
    "tunix serve google/gemma-3-1b-it --port 8000",
    value("model MODEL", "hub id, folder, or the folder of a run; not with --tiny", nargs="?"),
    ADAPTER,
    value("--host HOST", "address to listen on (127.0.0.1); any other wants a key", default="127.0.0.1"),
    value("--port PORT", "port to listen on (8000)", count, 8000),
    value(
        "--api-key-file FILE",
        "holds the key that clients have to send, as Authorization: Bearer KEY (the environment's TUNIX_API_KEY)",
        Path,
    ),
    value("--max-length N", "maximum tokens of prompt and answer (the model's own)", count),
    slots("requests answered"),
    DRAFTS,
    switch("--enable-lora", text="let a run load adapters beside the weights, which then are kept twice"),
    value(
        "--allow-updates FOLDER",
        "let clients load weights and adapters from within FOLDER, as a run does from its rollout.weights_folder",
        Path,
    ),
    switch("--tiny", text="a small random model, for trying out clients; it starts in seconds"),
    value("--train FOLDER", "train adapters through the Tinker protocol; their checkpoints are in this folder", Path),
    value("--rank N", "highest rank of an adapter that is trained (32)", count, 32),
    DTYPE,
)
def _serve(parsed: Parsed) -> None:
    from tunix.util.ports import listen, read_key

    if (parsed.model is None) is not parsed.tiny:
        raise UserError("tunix serve wants a model, or --tiny for a small random one, and not both")
    if parsed.tiny and parsed.mtp:
        raise UserError("--mtp: the small random model of --tiny has no head that drafts tokens: leave it out")
    key = read_key(parsed.api_key_file, parsed.host)
    # Before anything is imported: reading and compiling a model takes minutes, which a taken port makes worthless.
    # Clients wait until the model is there.
    with listen(parsed.host, parsed.port, f"--host {parsed.host} --port {parsed.port}") as listener:
        from tunix.inference.model import InferenceOptions

        try:
            from tunix.serving.app import TINY_SLOTS, serve
        except ModuleNotFoundError as error:
            raise UserError(f"tunix serve needs {error.name}: {install_command('serve')}") from None
        slots = parsed.slots or (TINY_SLOTS if parsed.tiny else None)
        options = filled(InferenceOptions, parsed, model=parsed.model or "tiny", slots=slots, length=parsed.max_length)
        filled(serve, parsed, options=options, listener=listener, api_key=key)


@command(
    "write a run's weights as a Hugging Face folder, a PEFT adapter, for MaxText or StableHLO; or its trajectories",
    "tunix export runs/quickstart exported --format maxtext",
    value("run RUN", "run folder; for other formats also a model folder or id", Path),
    NEW_FOLDER,
    value(
        "--format",
        "a model folder (huggingface), a checkpoint of MaxText, or compiled programs that run without tunix; or, in "
        "place of weights, the completions that the run recorded, a JSON file each (atif)",
        choices=("huggingface", "maxtext", "stablehlo", "atif"),
        default="huggingface",
    ),
    switch("--adapter", text="the adapter alone, as a PEFT folder"),
    PACKED,
    value("--step N", "step of the checkpoint; the last one by default", count),
    switch("--unscanned", text="maxtext: each layer's arrays apart, not stacked"),
    value("--batch N", "stablehlo: rows (1)", count),
    value("--prompt-length N", "stablehlo: tokens that a prompt may have, a multiple of 64 (512)", count),
    value("--length N", "stablehlo: tokens of prompt and answer (1024)", count),
)
def _export(parsed: Parsed) -> None:
    for name, format in EXPORT_OPTIONS.items():
        if vars(parsed)[name] and format != parsed.format:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to --format {format}, and changes nothing of "
                f"--format {parsed.format}: leave it out"
            )
    if parsed.format == "atif":
        from tunix.commands.trace import export_trajectories

        if parsed.step:
            raise UserError("--step names a checkpoint, and --format atif reads none: leave it out")
        print(f"{export_trajectories(parsed.run, parsed.out)} trajectories are in {parsed.out}")
        return
    from tunix.run.export import export, export_as

    if parsed.format == "huggingface":
        export(parsed.run, parsed.out, adapter=parsed.adapter, packed=parsed.packed, step=parsed.step)
    else:
        print(f"{parsed.run} is in {parsed.out}, as {parsed.format}: {filled(export_as, parsed)}")


@command(
    "make a Hugging Face folder of a checkpoint of MaxText",
    "tunix import maxtext:checkpoints/1000/items imported --like Qwen/Qwen3-0.6B",
    value(
        "source maxtext:FOLDER",
        "a checkpoint of MaxText: its arrays' folder, such as checkpoints/1000/items, or one above, for the last step",
    ),
    NEW_FOLDER,
    value(
        "--like MODEL",
        "model folder or hub id with config.json and tokenizer of the same model; by default those in FOLDER",
    ),
    value("--dtype", "of the written weights; each array's own by default", choices=DTYPES),
)
def _import(parsed: Parsed) -> None:
    scheme = "maxtext:"
    if not parsed.source.startswith(scheme):
        raise UserError(
            f"{parsed.source}: write which format it is, {scheme}FOLDER; Hugging Face's folders need no import"
        )
    from tunix.interop.maxtext import import_maxtext

    folder = Path(parsed.source.removeprefix(scheme)).expanduser()
    import_maxtext(folder, parsed.out, like=parsed.like, dtype=parsed.dtype)
    print(f"{folder} is in {parsed.out}, a model folder that every command reads")


COMMANDS = {
    "run": _run,
    "init": _init,
    "check": _check,
    "recipes": _recipes,
    "doctor": _doctor,
    "plan": _plan,
    "launch": _launch,
    "inspect": _inspect,
    "trace": _trace,
    "replay": _replay,
    "report": _report,
    "score": _score,
    "generate": _generate,
    "eval": _eval,
    "quantize": _quantize,
    "chat": _chat,
    "serve": _serve,
    "export": _export,
    "import": _import,
}


if __name__ == "__main__":
    entry()
