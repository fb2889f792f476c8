"""The command line: parses the arguments of a command, calls the module that implements it, returns an exit code.

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
from typing import TYPE_CHECKING, NoReturn

from tunix import __version__
from tunix.commands.arguments import (
    Parser,
    chat_arguments,
    check_arguments,
    eval_arguments,
    export_arguments,
    generate_arguments,
    import_arguments,
    inspect_arguments,
    launch_arguments,
    no_arguments,
    plan_arguments,
    quantize_arguments,
    run_arguments,
    score_arguments,
    serve_arguments,
    trace_arguments,
)
from tunix.errors import Interrupted, UserError, nearest
from tunix.util.full_disk import ROOM, is_full

if TYPE_CHECKING:
    from tunix.commands.generate import Selection
    from tunix.inference.model import InferenceOptions
    from tunix.types import Sampling

Parsed = argparse.Namespace


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
    from tunix.util import pathways

    # Under Pathways one process drives all devices, and there is no other to meet.
    if not pathways.begin() and (place := place_of(parsed.coordinator, parsed.processes, parsed.process)):
        join(place)
    run(recipe, fresh=parsed.fresh, verbose=parsed.verbose)


def _check(parsed: Parsed) -> None:
    from tunix.commands.check import check

    print(check(parsed.recipe, parsed.overrides, tiny=parsed.tiny, everything=parsed.all), end="")


def _recipes(parsed: Parsed) -> None:
    import shutil

    from tunix.commands.recipes import recipe_lines
    from tunix.recipe.recipe import included_recipes

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(recipe_lines(included_recipes(), width)))


def _doctor(parsed: Parsed) -> None:
    from tunix.commands.doctor import doctor

    findings, healthy = doctor()
    print("\n".join(map(str, findings)))
    if not healthy:
        raise SystemExit(1)


def _plan(parsed: Parsed) -> None:
    from tunix.commands.plan import plan
    from tunix.recipe.recipe import Recipe

    recipe = Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny)
    plan(recipe, parsed.topology or [None], parsed.deadline, as_json=parsed.json)


def _launch(parsed: Parsed) -> None:
    from tunix.commands.launch import Destination, launch
    from tunix.launch.job import Options
    from tunix.launch.storage import mount_of
    from tunix.recipe.recipe import Recipe

    given = vars(parsed)
    same = ("target", "topology", "slices", "per_host", "name", "image", "namespace", "service_account", "pathways_dir")
    options = Options(
        **{key: given[key] for key in (*same, "restarts", "grace")},
        mounts=tuple(map(mount_of, parsed.mount)),
        secrets=tuple(secret.partition("=")[::2] for secret in parsed.secret),
        setup=tuple(parsed.setup),
        sbatch=tuple(parsed.sbatch),
    )
    destination = Destination(parsed.out, parsed.overwrite, parsed.dry_run, parsed.submit)
    launch(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), options, destination, plan=not parsed.no_plan)


def _inspect(parsed: Parsed) -> None:
    from tunix.commands.inspect import show
    from tunix.recipe.recipe import Recipe

    show(Recipe.load(parsed.recipe, parsed.overrides, parsed.tiny), parsed.rows)


def _trace(parsed: Parsed) -> None:
    from tunix.commands.trace import trace

    print(f"{trace(parsed.run, parsed.step, parsed.out)}: open it at https://ui.perfetto.dev")


def _score(parsed: Parsed) -> None:
    from tunix.commands.score import score

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
    from tunix.commands.compare_adapters import compare
    from tunix.commands.generate import generate

    adapters, selection, sampling = parsed.adapter, _selection(parsed), _sampling(parsed)
    settings = {"rows": parsed.input, "out": parsed.out, "sampling": sampling, "n": parsed.n, "seed": parsed.seed}
    if len(adapters) < 2:
        parsed.adapter = adapters[0] if adapters else None
        generate(_inference_options(parsed, parsed.slots), parsed.prompt, selection=selection, **settings)
        return
    if selection is not None:
        raise UserError("--reward scores the completions of one model: give one --adapter at a time")
    parsed.adapter = None
    compare(_inference_options(parsed, parsed.slots), adapters, parsed.prompt, **settings)


def _selection(parsed: Parsed) -> "Selection | None":
    """How completions are scored and selected; None without rewards."""
    from tunix.commands.generate import Selection
    from tunix.commands.reward_flags import reward_config

    rewards = reward_config(parsed.reward, parsed.reward_model, parsed.deadline)
    if rewards is not None:
        return Selection(rewards, parsed.best, parsed.threshold)
    for name in ("best", "threshold"):
        if vars(parsed)[name] is not None:
            raise UserError(f"--{name} selects by reward: add --reward, for instance exact_match")
    return None


def _eval(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions, evaluate
    from tunix.commands.reward_flags import reward_config

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


def _quantize(parsed: Parsed) -> None:
    from tunix.commands.evaluate import EvalOptions
    from tunix.commands.quantize import quantize
    from tunix.inference.model import InferenceOptions

    options = InferenceOptions(parsed.model, parsed.adapter, parsed.dtype)
    eval_options = EvalOptions(data=parsed.data, rows=parsed.rows)
    quantize(options, parsed.out, parsed.rules, eval_options, packed=parsed.packed)


def _chat(parsed: Parsed) -> None:
    from tunix.commands.chat import chat

    chat(_inference_options(parsed, slots=1), sampling=_sampling(parsed), seed=parsed.seed)


def _serve(parsed: Parsed) -> None:
    from tunix.util.ports import listen

    # Before anything is imported: reading and compiling a model takes minutes, which a taken port makes worthless.
    listener = listen(parsed.host, parsed.port, f"--host {parsed.host} --port {parsed.port}")
    from tunix.commands.serve import serve
    from tunix.inference.model import InferenceOptions

    rest = {"slots": parsed.slots, "length": parsed.max_length}
    options = InferenceOptions(parsed.model, parsed.adapter, parsed.dtype, **rest)
    serve(options, listener, adapters=parsed.enable_lora)


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


def _export(parsed: Parsed) -> None:
    from tunix.commands.convert import HUGGINGFACE, OPTIONS, check_options, export_converted

    given = {name: value for name, value in vars(parsed).items() if name in OPTIONS and value}
    check_options(parsed.format, given)
    if parsed.format != HUGGINGFACE:
        export_converted(parsed.run, parsed.out, parsed.format, given, parsed.step)
        return
    from tunix.run.export import export

    export(parsed.run, parsed.out, adapter=parsed.adapter, packed=parsed.packed, step=parsed.step)


def _import(parsed: Parsed) -> None:
    from tunix.commands.convert import import_model

    import_model(parsed.source, parsed.out, parsed.like, parsed.dtype)


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
