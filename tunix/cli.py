"""The command line: declares and parses the arguments of a command, calls what implements it, returns an exit code.

Exit code 0 is success, 2 a user error, reported in a sentence, 75 the loss of another process of the run
(`distributed/meeting.py`), 130 an interruption. Any other exception is a defect of tunix and shows its traceback.
Nothing heavy is imported before a command needs it. `COMMANDS` at the end is the table of all commands.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tunix import __version__
from tunix.errors import Interrupted, UserError, install_command, nearest
from tunix.util.atomic_io import ROOM, is_full

if TYPE_CHECKING:
    from tunix.commands.generate import Selection
    from tunix.inference.model import InferenceOptions
    from tunix.types import Sampling

Parsed = argparse.Namespace
DTYPES = ("float32", "bfloat16")
FORMATS = ("huggingface", "maxtext", "stablehlo")
TARGETS = ("slurm", "gke-tpu", "gke-gpu", "pathways")
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


@dataclass(frozen=True)
class Command:
    """A command: its help, its arguments, and the function that runs it."""

    summary: str
    """One line for `tunix --help`."""
    example: str
    """A complete call, for the help of the command."""
    arguments: Callable[[Parser], None]
    """Declares the arguments."""
    execute: Callable[[Parsed], None]
    """Runs the command; imports the modules that it needs."""


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
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UserError as error:
        if os.environ.get("TUNIX_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not is_full(error):
            raise
        print(f"error: {error.filename or 'a file'} could not be written: {error.strerror}. {ROOM}.", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    """Runs the command that the first word names with the other words as its arguments.

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
        parser = Parser(
            f"tunix {name}", description=command.summary, epilog=f"example: {command.example}", allow_abbrev=False
        )
        command.arguments(parser)
        # Intermixed, so that overrides and options may follow each other in any order.
        command.execute(parser.parse_intermixed_args(words[1:]))
    return 0


def _overview() -> str:
    """The output of `tunix --help`."""
    rows = "\n".join(f"  {name:<9}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: tunix COMMAND ...

Post-training of language models, from a recipe in YAML.

commands:
{rows}

examples:
  tunix run recipes/quickstart.yaml
  tunix run recipes/sft_gemma.yaml optimizer.learning_rate=1e-5 output=runs/slower
  tunix run recipes/sft_gemma.yaml --tiny      on a laptop, without a download

`tunix COMMAND --help` says more. Exit codes: 0 done, 2 user error, 75 another process lost, 130 interrupted."""


def recipe_arguments(parser: Parser) -> None:
    """Declares a recipe, its overrides and `--tiny`."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, or the name of one that tunix brings")
    replaces = "replaces a value of the recipe, e.g. optimizer.learning_rate=1e-5"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=replaces)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a two-layer random model, and generated rows for those of the hub: no download",
    )


def no_arguments(parser: Parser) -> None:
    """Declares none."""


def _reward_arguments(parser: Parser) -> None:
    judges = (
        "scores each completion: a built-in reward, file.py:function or module:function, followed by options "
        "('length target=40 width=20'), or an entry of a recipe ('{name: number, columns: {answer: solution}}'); "
        "may be given several times"
    )
    parser.add_argument("--reward", action="append", default=[], metavar="REWARD", help=judges)
    model = "hub id, folder or run of a reward model that scores each completion"
    parser.add_argument("--reward-model", metavar="MODEL", help=model)
    parser.add_argument(
        "--deadline", type=float, default=10.0, metavar="S", help="maximum seconds of a reward's call (10)"
    )


def _sampling_arguments(parser: Parser, max_tokens: int) -> None:
    most = f"maximum tokens of an answer ({max_tokens})"
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=most)
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1.0)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens; 0 for all (0)"
    )
    mass = "only the most likely tokens that together reach P; 1 for all (1.0)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=mass)
    share = "only tokens at least P times as likely as the likeliest (0.0)"
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help=share)
    _prompt_arguments(parser)


def _prompt_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    raw = "send text as it stands, also where there is a chat template"
    parser.add_argument("--raw", action="store_true", help=raw)
    stop = "ends an answer, and is left out of its text; may be given several times"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the sampling: the same seed gives the same answers (0)"
    )
    _dtype_argument(parser)


def _packed_argument(parser: Parser) -> None:
    packed = "write rounded weights in few bits (compressed-tensors, which transformers and vLLM read); not for nf4"
    parser.add_argument("--packed", action="store_true", help=packed)


def _model_argument(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")


def _slots_argument(parser: Parser, what: str) -> None:
    at_a_time = f"{what} at a time: more memory, more speed, the same result"
    parser.add_argument("--slots", type=_count, metavar="N", help=at_a_time)


def _dtype_argument(parser: Parser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


def _verbose_argument(parser: Parser) -> None:
    says = "also say how it is computed: kernels, memory, rematerialization, libraries' warnings (always in log.txt)"
    parser.add_argument("-v", "--verbose", action="store_true", help=says)


def _adapter_argument(parser: Parser) -> None:
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter on top of the model")


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


def run_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix run`."""
    recipe_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="start again even where the run folder could be resumed")
    _verbose_argument(parser)
    unasked = "do not compile the programs first to see whether they fit the accelerators here (`tunix plan`)"
    parser.add_argument("--no-plan", action="store_true", help=unasked)
    meets = "address of process 0 where a run has several processes, e.g. 10.0.0.1:8476; each is given the same"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=meets)
    several = "number of processes (found by itself under SLURM, Kubernetes and on TPU pods)"
    parser.add_argument("--processes", type=_count, metavar="N", help=several)
    parser.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")


def _run(parsed: Parsed) -> None:
    from tunix.run.opening import opened
    from tunix.util.ports import refuse_taken

    if parsed.process == 0 and parsed.coordinator:
        refuse_taken(parsed.coordinator)
    # Of several processes the first one speaks. JAX alone knows every scheduler's way to say which one this is.
    numbers = (parsed.process, os.environ.get("JAX_PROCESS_ID"), os.environ.get("SLURM_PROCID"))
    alone = all(number is None for number in numbers)
    recipe, line = opened(parsed.recipe, parsed.overrides, parsed.tiny, alone)
    if alone or all(str(number) in ("None", "0") for number in numbers):
        print(line, file=sys.stderr, flush=True)
    if not parsed.verbose:
        # XLA's C++ prints warnings to the terminal on its own account; errors stay. It is read when JAX is imported.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not (parsed.tiny or parsed.no_plan):
        from tunix.commands.plan import require_fit

        require_fit(recipe, parsed.fresh)
    from tunix.distributed.meeting import join, place_of  # these load jax, without which all of the above is done
    from tunix.run.train import run
    from tunix.util.startup import begin_pathways

    # Under Pathways one process drives all devices, and there is no other to meet.
    if not begin_pathways() and (place := place_of(parsed.coordinator, parsed.processes, parsed.process)):
        join(place)
    run(recipe, fresh=parsed.fresh, verbose=parsed.verbose)


def check_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix check`."""
    recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="print every value, also those that were filled in")


def _check(parsed: Parsed) -> None:
    from tunix.commands.check import check

    print(check(parsed.recipe, parsed.overrides, tiny=parsed.tiny, everything=parsed.all), end="")


def _recipes(parsed: Parsed) -> None:
    import shutil

    from tunix.recipe.notes import recipe_lines
    from tunix.recipe.recipe import included_recipes

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(recipe_lines(included_recipes(), width)))


def _doctor(parsed: Parsed) -> None:
    from tunix.commands.doctor import doctor

    findings, healthy = doctor()
    print("\n".join(map(str, findings)))
    if not healthy:
        raise SystemExit(1)


def plan_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix plan`."""
    recipe_arguments(parser)
    devices = "devices that need not be here, e.g. v5e:4x4, v5p:8x8x8, v6e:16x16, h100:8, h200:1; may be given several "
    devices += "times; without it those at hand"
    parser.add_argument("--topology", action="append", default=[], metavar="CHIP:SHAPE", help=devices)
    stops = "maximum seconds of each plan (600)"
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help=stops)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _plan(parsed: Parsed) -> None:
    from tunix.commands.plan import plan
    from tunix.recipe.recipe import Recipe

    recipe = Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny)
    plan(recipe, parsed.topology or [None], parsed.deadline, as_json=parsed.json)


def launch_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix launch`."""
    recipe_arguments(parser)
    parser.add_argument("--target", choices=TARGETS, required=True, help="scheduler that the job is for")
    devices = "devices of the job, as in `tunix plan`: h100:16, v5e:4x4; the number may be left out where mesh has it"
    parser.add_argument("--topology", metavar="CHIP:SHAPE", help=devices)
    parser.add_argument("--slices", type=_count, default=1, metavar="N", help="slices of TPUs, each of --topology (1)")
    usual = "devices of a host, each of which runs one process (8 GPUs, 4 TPUs)"
    parser.add_argument("--per-host", type=_count, metavar="N", help=usual)
    parser.add_argument("--name", metavar="NAME", help="name of the job (that of the run folder)")
    parser.add_argument("--restarts", type=_count, default=20, metavar="N", help="maximum number of restarts (20)")
    saves = "seconds between SIGTERM and SIGKILL, in which a checkpoint is written (120)"
    parser.add_argument("--grace", type=_count, default=120, metavar="S", help=saves)
    hidden = (
        "variable for the run whose value is not written down: HF_TOKEN=hf/token, a Secret and its key; on SLURM a "
        "file, HF_TOKEN=~/.hf_token; may be given several times"
    )
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=WHERE", help=hidden)
    # What becomes of the file.
    writes = "file to write (NAME.sbatch or NAME.yaml)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=writes)
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is another one")
    parser.add_argument("--dry-run", action="store_true", help="print the file, and write nothing")
    parser.add_argument("--submit", action="store_true", help="submit what was written, by sbatch or kubectl apply")
    _verbose_argument(parser)
    unasked = "do not compile the programs first to see whether they fit (`tunix plan`)"
    parser.add_argument("--no-plan", action="store_true", help=unasked)
    # What single schedulers need.
    parser.add_argument("--image", metavar="IMAGE", help="Kubernetes: container image with tunix in it")
    volume = "Kubernetes: a PersistentVolumeClaim that all pods may write; may be given several times"
    parser.add_argument("--mount", action="append", default=[], metavar="CLAIM:/PATH", help=volume)
    parser.add_argument("--namespace", metavar="NAME", help="Kubernetes: namespace (that of kubectl's context)")
    account = "Kubernetes: service account of the pods, for access to gs://"
    parser.add_argument("--service-account", metavar="NAME", help=account)
    kept = "Pathways: folder for its own files, gs://BUCKET/FOLDER"
    parser.add_argument("--pathways-dir", metavar="URL", help=kept)
    lines = "SLURM: line of shell before the run, e.g. 'source ~/tunix/bin/activate'; may be given several times"
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help=lines)
    more = "SLURM: option of sbatch, e.g. partition=gpu, time=04:00:00; may be given several times"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)


def _launch(parsed: Parsed) -> None:
    from tunix.commands.launch import Destination, launch
    from tunix.launch.job import Options, mount_of
    from tunix.recipe.recipe import Recipe

    options = Options(
        target=parsed.target,
        topology=parsed.topology,
        slices=parsed.slices,
        per_host=parsed.per_host,
        name=parsed.name,
        image=parsed.image,
        namespace=parsed.namespace,
        service_account=parsed.service_account,
        pathways_dir=parsed.pathways_dir,
        restarts=parsed.restarts,
        grace=parsed.grace,
        mounts=tuple(map(mount_of, parsed.mount)),
        secrets=tuple(secret.partition("=")[::2] for secret in parsed.secret),
        setup=tuple(parsed.setup),
        sbatch=tuple(parsed.sbatch),
    )
    destination = Destination(parsed.out, parsed.overwrite, parsed.dry_run, parsed.submit)
    launch(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), options, destination, plan=not parsed.no_plan)


def inspect_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix inspect`."""
    recipe_arguments(parser)
    parser.add_argument("--rows", type=_count, default=4, metavar="N", help="examples to show (4)")


def _inspect(parsed: Parsed) -> None:
    from tunix.commands.inspect import show
    from tunix.recipe.recipe import Recipe

    show(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), parsed.rows)


def trace_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix trace`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("step", type=_count, metavar="STEP", help="number of the step, from 1")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".json to write (RUN/trace-STEP.json)")


def _trace(parsed: Parsed) -> None:
    from tunix.commands.trace import trace

    print(f"{trace(parsed.run, parsed.step, parsed.out)}: open it at https://ui.perfetto.dev")


def score_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix score`."""
    _model_argument(parser)
    parser.add_argument("data", metavar="DATA", help=".jsonl with rows of text, messages or input_ids")
    writes = ".jsonl to write: logprobs, tokens and sum of each row"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=writes)
    _adapter_argument(parser)
    parser.add_argument("--batch-size", type=_count, default=8, metavar="N", help="rows per micro-batch (8)")
    parser.add_argument("--max-length", type=_count, default=1024, metavar="N", help="maximum tokens of a row (1024)")
    _dtype_argument(parser)


def _score(parsed: Parsed) -> None:
    from tunix.inference.scoring import score

    score(
        parsed.model,
        parsed.data,
        parsed.out,
        adapter=parsed.adapter,
        batch_size=parsed.batch_size,
        max_length=parsed.max_length,
        dtype=parsed.dtype,
    )


def generate_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix generate`."""
    _model_argument(parser)
    sent = (
        "text to answer: sent as a user's message where the tokenizer has a chat template, as it stands where it has "
        "none, or where the model is a run that was trained on plain strings; so are the strings of --input"
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=sent)
    reads = ".jsonl with a row for each prompt: `prompt`, `messages` or `input_ids`"
    parser.add_argument("--input", metavar="FILE", help=reads)
    writes = (
        ".jsonl to write, an object for each completion: row (from 0), sample, the row's prompt, tokens, text, "
        "logprobs, finish"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=writes)
    parser.add_argument("--n", type=_count, default=1, metavar="N", help="completions of each prompt (1)")
    several = "PEFT adapter on top of the model; may be given several times, to compare the answers of each"
    parser.add_argument("--adapter", type=Path, action="append", default=[], metavar="DIR", help=several)
    _slots_argument(parser, "completions sampled")
    _reward_arguments(parser)
    best = "write rows to train on instead: the K best completions of each prompt (1), of equal ones the first"
    parser.add_argument("--best", type=_count, nargs="?", const=1, metavar="K", help=best)
    least = "write rows to train on instead: the completions with a reward of at least X; also with --best"
    parser.add_argument("--threshold", type=float, metavar="X", help=least)
    _sampling_arguments(parser, max_tokens=256)


def _generate(parsed: Parsed) -> None:
    from tunix.commands.compare_adapters import compare
    from tunix.commands.generate import generate

    adapters, selection, sampling = parsed.adapter, _selection(parsed), _sampling(parsed)
    parsed.adapter = adapters[0] if len(adapters) == 1 else None
    options = _inference_options(parsed, parsed.slots)
    if len(adapters) < 2:
        generate(
            options,
            parsed.prompt,
            rows=parsed.input,
            out=parsed.out,
            sampling=sampling,
            n=parsed.n,
            seed=parsed.seed,
            selection=selection,
        )
        return
    if selection is not None:
        raise UserError("--reward scores the completions of one model: give one --adapter at a time")
    compare(
        options,
        adapters,
        parsed.prompt,
        rows=parsed.input,
        out=parsed.out,
        sampling=sampling,
        n=parsed.n,
        seed=parsed.seed,
    )


def _selection(parsed: Parsed) -> "Selection | None":
    """How completions are scored and selected; None without rewards."""
    from tunix.commands.generate import Selection
    from tunix.commands.sampling import reward_config

    rewards = reward_config(parsed.reward, parsed.reward_model, parsed.deadline)
    if rewards is not None:
        return Selection(rewards, parsed.best, parsed.threshold)
    for name in ("best", "threshold"):
        if vars(parsed)[name] is not None:
            raise UserError(f"--{name} selects by reward: add --reward, for instance exact_match")
    return None


def eval_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix eval`."""
    _model_argument(parser)
    reads = (
        ".jsonl, .csv, .parquet, folder, hub id or file.py:function, of which the split for validation or test is read "
        "unless --split names one; of a run its held-out rows, where nothing is given"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help=reads)
    tasks = (
        "loss: of the rows' completions, and perplexity; reward: mean of the model's answers; accuracy: share of "
        "answers with a reward of --threshold or more; pass: pass@k; pairs: chosen above rejected. By default what the "
        "run or the rows are for"
    )
    parser.add_argument("--task", choices=("loss", "reward", "accuracy", "pass", "pairs"), help=tasks)
    _reward_arguments(parser)
    parser.add_argument("--threshold", type=float, metavar="X", help="minimum reward of a right answer (1)")
    parser.add_argument("--n", type=_count, metavar="N", help="answers to each row (1; 8 for pass)")
    parser.add_argument("--k", type=_count, nargs="+", default=[], metavar="K", help="values of k for pass@k (1 and N)")
    parser.add_argument("--rows", type=_count, metavar="N", help="rows from the start (all; a run's eval.rows)")
    parser.add_argument("--split", metavar="NAME", help="split of DATA, where it has splits")
    called = "a column with another name, as in prompt=question; may be given several times"
    parser.add_argument("--column", action="append", default=[], metavar="OURS=THEIRS", help=called)
    parser.add_argument("--out", type=Path, metavar="FILE", help=".json for numbers and rows, .jsonl for the rows")
    parser.add_argument(
        "--max-tokens", type=_count, metavar="N", help="maximum tokens of an answer (256, or the run's)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0; for pass 1, or the run's)")
    _slots_argument(parser, "completions sampled")
    _adapter_argument(parser)
    _prompt_arguments(parser)


def _eval(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions, evaluate
    from tunix.commands.sampling import reward_config

    columns = dict(column.partition("=")[::2] for column in parsed.column)
    if wrong := next((ours for ours, theirs in columns.items() if not (ours and theirs)), None):
        raise UserError(f"--column {wrong!r}: write ours=theirs, as in prompt=question")
    eval_options = EvalOptions(
        data=parsed.data,
        split=parsed.split,
        columns=columns,
        rows=parsed.rows,
        task=parsed.task,
        rewards=reward_config(parsed.reward, parsed.reward_model, parsed.deadline),
        threshold=parsed.threshold,
        n=parsed.n,
        ks=tuple(parsed.k),
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        stop=tuple(parsed.stop),
        seed=parsed.seed,
    )
    evaluate(_inference_options(parsed, parsed.slots), eval_options, parsed.out)


def quantize_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix quantize`."""
    _model_argument(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; nothing that exists is overwritten")
    rules = (
        "MODULE=TYPE, MODULE=TYPE:TILE or MODULE=TYPE/ACTIVATIONS, separated by commas, the first that matches counts, "
        "as in 'o_proj=none,mlp.*=int4:64,.*=int8/int8'; or a .yaml file with a list `rules` (.*=int8)"
    )
    parser.add_argument("--rules", default=".*=int8", metavar="RULES", help=rules)
    reads = "rows that the loss is measured on, before and after; of a run its held-out rows, where nothing is given"
    parser.add_argument("--data", metavar="DATA", help=reads)
    parser.add_argument("--rows", type=_count, metavar="N", help="rows from the start (all; a run's eval.rows)")
    _packed_argument(parser)
    _adapter_argument(parser)
    dtype = "of the written weights and the computation (float32): bfloat16 is half as large, and no longer exact"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=dtype)


def _quantize(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions
    from tunix.commands.quantize import quantize
    from tunix.inference.model import InferenceOptions

    options = InferenceOptions(parsed.model, parsed.adapter, parsed.dtype)
    eval_options = EvalOptions(data=parsed.data, rows=parsed.rows)
    quantize(options, parsed.out, parsed.rules, eval_options, packed=parsed.packed)


def chat_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix chat`."""
    _model_argument(parser)
    _adapter_argument(parser)
    _sampling_arguments(parser, max_tokens=1024)


def _chat(parsed: Parsed) -> None:
    from tunix.commands.chat import chat

    chat(_inference_options(parsed, slots=1), sampling=_sampling(parsed), seed=parsed.seed)


def serve_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix serve`."""
    _model_argument(parser)
    _adapter_argument(parser)
    listens = "address to listen on (127.0.0.1); whoever reaches it can have it load any folder that it can read"
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=listens)
    parser.add_argument("--port", type=_count, default=8000, metavar="PORT", help="port to listen on (8000)")
    longest = "maximum tokens of prompt and answer (the model's own)"
    parser.add_argument("--max-length", type=_count, metavar="N", help=longest)
    _slots_argument(parser, "requests answered")
    keeps = "let a run load adapters beside the weights, which then are kept twice"
    parser.add_argument("--enable-lora", action="store_true", help=keeps)
    _dtype_argument(parser)


def _serve(parsed: Parsed) -> None:
    """Answers completions over HTTP until Ctrl-C, for runs that sample elsewhere than they train, and other clients.

    Raises:
        UserError: the port is taken, the model is not accessible or cannot sample, or the server's packages are not
            installed.
    """
    from tunix.util.ports import listen

    # Before anything is imported: reading and compiling a model takes minutes, which a taken port makes worthless.
    # Clients wait until the model is there.
    with listen(parsed.host, parsed.port, f"--host {parsed.host} --port {parsed.port}") as listener:
        from tunix.hf.source import require_lm_head
        from tunix.inference.model import InferenceModel, InferenceOptions

        try:
            from tunix.serving.app import server_of
        except ModuleNotFoundError as error:
            raise UserError(f"tunix serve needs {error.name}: {install_command('serve')}") from None
        from tunix.serving.service import Service

        inference = InferenceModel(
            InferenceOptions(parsed.model, parsed.adapter, parsed.dtype, slots=parsed.slots, length=parsed.max_length)
        )
        require_lm_head(inference.source, parsed.model)
        print(f"{parsed.model}: reading, and compiling for {inference.slots} requests at a time", file=sys.stderr)
        service = Service(inference, adapters=parsed.enable_lora)
        service.warm()
        host, port, *_ = listener.getsockname()
        where = f"[{host}]" if ":" in host else host
        print(f"http://{where}:{port} answers, up to {service.length} tokens; Ctrl-C ends", file=sys.stderr, flush=True)
        server_of(service).run(sockets=[listener])


def _inference_options(parsed: Parsed, slots: int | None) -> "InferenceOptions":
    from tunix.inference.model import InferenceOptions

    return InferenceOptions(parsed.model, parsed.adapter, parsed.dtype, slots, parsed.system, parsed.raw)


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


def export_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder; for other formats also a model folder or id")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; nothing that exists is overwritten")
    formats = "a model folder (huggingface), a checkpoint of MaxText, or compiled programs that run without tunix"
    parser.add_argument("--format", choices=FORMATS, default="huggingface", help=formats)
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as a PEFT folder")
    _packed_argument(parser)
    parser.add_argument("--step", type=_count, metavar="N", help="step of the checkpoint; the last one by default")
    parser.add_argument("--unscanned", action="store_true", help="maxtext: each layer's arrays apart, not stacked")
    parser.add_argument("--batch", type=_count, metavar="N", help="stablehlo: rows (1)")
    prompt = "stablehlo: tokens that a prompt may have, a multiple of 64 (512)"
    parser.add_argument("--prompt-length", type=_count, metavar="N", help=prompt)
    parser.add_argument("--length", type=_count, metavar="N", help="stablehlo: tokens of prompt and answer (1024)")


def _export(parsed: Parsed) -> None:
    options = {name: value for name, value in vars(parsed).items() if name in EXPORT_OPTIONS and value}
    for name in options:
        if EXPORT_OPTIONS[name] != parsed.format:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to --format {EXPORT_OPTIONS[name]}, and changes nothing of "
                f"--format {parsed.format}: leave it out"
            )
    from tunix.run.export import export, export_as

    if parsed.format == "huggingface":
        export(parsed.run, parsed.out, adapter=parsed.adapter, packed=parsed.packed, step=parsed.step)
        return
    if parsed.format == "maxtext":
        from tunix.interop.maxtext import export_maxtext

        convert = partial(export_maxtext, scanned=not parsed.unscanned)
    else:
        from tunix.interop.stablehlo import Shapes, export_stablehlo

        shapes = Shapes(parsed.batch or 1, parsed.prompt_length or 512, parsed.length or 1024)
        convert = partial(export_stablehlo, shapes=shapes)
    loading = export_as(parsed.run, parsed.out, convert, parsed.step)
    print(f"{parsed.run} is in {parsed.out}, as {parsed.format}: {loading}")


def import_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix import`."""
    source = (
        "a checkpoint of MaxText: its arrays' folder, such as checkpoints/1000/items, or one above, for the last step"
    )
    parser.add_argument("source", metavar="maxtext:FOLDER", help=source)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; nothing that exists is overwritten")
    like = "model folder or hub id with config.json and tokenizer of the same model; by default those in FOLDER"
    parser.add_argument("--like", metavar="MODEL", help=like)
    dtype = "of the written weights; each array's own by default"
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)


def _import(parsed: Parsed) -> None:
    scheme = "maxtext:"
    if not parsed.source.startswith(scheme):
        raise UserError(
            f"{parsed.source}: write which format it is, {scheme}FOLDER; Hugging Face's folders need no import"
        )
    from tunix.hf.model_folder import resolve_folder
    from tunix.interop.maxtext import import_maxtext

    folder = Path(parsed.source.removeprefix(scheme)).expanduser()
    like = None if parsed.like is None else resolve_folder(parsed.like)
    import_maxtext(folder, parsed.out, like=like, dtype=parsed.dtype)
    print(f"{folder} is in {parsed.out}, a model folder that every command reads")


COMMANDS = {
    "run": Command(
        "train; resumes where the run folder holds the same recipe",
        "tunix run recipes/sft_gemma.yaml steps=100 --tiny",
        run_arguments,
        _run,
    ),
    "check": Command(
        "validate a recipe with its rows, rewards and folders, and print what it says",
        "tunix check recipes/sft_gemma.yaml optimizer.name=lion --all",
        check_arguments,
        _check,
    ),
    "recipes": Command(
        "list the recipes that tunix brings, the measured ones first",
        "tunix recipes | less",
        no_arguments,
        _recipes,
    ),
    "doctor": Command(
        "say what this machine can run and what is missing; exit code 1 where something is",
        "tunix doctor && tunix run quickstart",
        no_arguments,
        _doctor,
    ),
    "plan": Command(
        "what a recipe needs of devices that need not be here, by their compilers",
        "tunix plan recipes/sft_gemma.yaml --topology h100:1",
        plan_arguments,
        _plan,
    ),
    "launch": Command(
        "write the job of a recipe for SLURM, GKE or Pathways",
        "tunix launch recipes/sft_llama_70b.yaml --target slurm --topology h100:256 --dry-run",
        launch_arguments,
        _launch,
    ),
    "inspect": Command(
        "show rendered examples, their trained tokens, and the accounting of the rows",
        "tunix inspect recipes/quickstart.yaml --rows 3",
        inspect_arguments,
        _inspect,
    ),
    "trace": Command(
        "what a step of a run spent its time on, as a chart for Perfetto",
        "tunix trace runs/grpo_gemma 12",
        trace_arguments,
        _trace,
    ),
    "score": Command(
        "per-token log-probs of given rows, and their perplexity",
        "tunix score google/gemma-3-1b-it rows.jsonl --out scores.jsonl",
        score_arguments,
        _score,
    ),
    "generate": Command(
        "answer a prompt, or a file of them",
        'tunix generate google/gemma-3-1b-it "Why is the sky blue?" --temperature 0',
        generate_arguments,
        _generate,
    ),
    "eval": Command(
        "measure a model on held-out rows: loss, reward, accuracy, pass@k, pairs",
        "tunix eval runs/quickstart",
        eval_arguments,
        _eval,
    ),
    "quantize": Command(
        "round a model's matrices to few bits, and measure the error",
        "tunix quantize google/gemma-3-1b-it rounded --rules 'mlp.*=int4:64,.*=int8' --data rows.jsonl",
        quantize_arguments,
        _quantize,
    ),
    "chat": Command(
        "talk with a model",
        "tunix chat runs/sft_gemma --system 'Answer in one sentence.'",
        chat_arguments,
        _chat,
    ),
    "serve": Command(
        "answer completions over HTTP, for runs that sample elsewhere than they train",
        "tunix serve google/gemma-3-1b-it --port 8000",
        serve_arguments,
        _serve,
    ),
    "export": Command(
        "write a run's weights as a Hugging Face folder, a PEFT adapter, or for MaxText or StableHLO",
        "tunix export runs/quickstart exported --format maxtext",
        export_arguments,
        _export,
    ),
    "import": Command(
        "make a Hugging Face folder of a checkpoint of MaxText",
        "tunix import maxtext:checkpoints/1000/items imported --like Qwen/Qwen3-0.6B",
        import_arguments,
        _import,
    ),
}


if __name__ == "__main__":
    entry()
