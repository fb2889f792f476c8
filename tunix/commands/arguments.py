"""The arguments of each command, declared for argparse and checked before anything is loaded."""

import argparse
from pathlib import Path
from typing import NoReturn

from tunix.errors import UserError, nearest

DTYPES = ("float32", "bfloat16")
FORMATS = ("huggingface", "maxtext", "stablehlo")
TARGETS = ("slurm", "gke-tpu", "gke-gpu", "pathways")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` and suggests the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`, which `main` prints, instead of exiting."""
        options = [option for action in self._actions for option in action.option_strings]
        wrong = [word for word in message.split() if word.startswith("--") and word not in options]
        hint = nearest(wrong[0], options) if wrong else ""
        raise UserError(f"{message}.{hint} `{self.prog} --help` shows how it is called")


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


def check_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix check`."""
    recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="print every value, also those that were filled in")


def run_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix run`."""
    recipe_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="start again even where the run folder could be resumed")
    says = "also say how it is computed: kernels, memory, rematerialization, libraries' warnings (always in log.txt)"
    parser.add_argument("-v", "--verbose", action="store_true", help=says)
    unasked = "do not compile the programs first to see whether they fit the accelerators here (`tunix plan`)"
    parser.add_argument("--no-plan", action="store_true", help=unasked)
    meets = "address of process 0 where a run has several processes, e.g. 10.0.0.1:8476; each is given the same"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=meets)
    several = "number of processes (found by itself under SLURM, Kubernetes and on TPU pods)"
    parser.add_argument("--processes", type=_count, metavar="N", help=several)
    parser.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")


def plan_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix plan`."""
    recipe_arguments(parser)
    devices = "devices that need not be here, e.g. v5e:4x4, v5p:8x8x8, v6e:16x16, h100:8, h200:1; may be given several "
    devices += "times; without it those at hand"
    parser.add_argument("--topology", action="append", default=[], metavar="CHIP:SHAPE", help=devices)
    stops = "maximum seconds of each plan (600)"
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help=stops)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


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
    _file_arguments(parser)
    _cluster_arguments(parser)


def _file_arguments(parser: Parser) -> None:
    """Declares what becomes of the file that `tunix launch` makes."""
    writes = "file to write (NAME.sbatch or NAME.yaml)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=writes)
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is another one")
    parser.add_argument("--dry-run", action="store_true", help="print the file, and write nothing")
    parser.add_argument("--submit", action="store_true", help="submit what was written, by sbatch or kubectl apply")
    says = "also say how it is computed: kernels, memory, rematerialization, libraries' warnings (always in log.txt)"
    parser.add_argument("-v", "--verbose", action="store_true", help=says)
    unasked = "do not compile the programs first to see whether they fit (`tunix plan`)"
    parser.add_argument("--no-plan", action="store_true", help=unasked)


def _cluster_arguments(parser: Parser) -> None:
    """Declares what single schedulers need."""
    parser.add_argument("--image", metavar="IMAGE", help="Kubernetes: container image with tunix in it")
    volume = "Kubernetes: a PersistentVolumeClaim that all pods may write; may be given several times"
    parser.add_argument("--mount", action="append", default=[], metavar="CLAIM:/PATH", help=volume)
    parser.add_argument("--namespace", metavar="NAME", help="Kubernetes: namespace (that of kubectl's context)")
    account = "Kubernetes: service account of the pods, for access to gs://"
    parser.add_argument("--service-account", metavar="NAME", help=account)
    own = "Pathways: folder for its own files, gs://BUCKET/FOLDER"
    parser.add_argument("--pathways-dir", metavar="URL", help=own)
    lines = "SLURM: line of shell before the run, e.g. 'source ~/tunix/bin/activate'; may be given several times"
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help=lines)
    more = "SLURM: option of sbatch, e.g. partition=gpu, time=04:00:00; may be given several times"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)


def inspect_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix inspect`."""
    recipe_arguments(parser)
    parser.add_argument("--rows", type=_count, default=4, metavar="N", help="examples to show (4)")


def trace_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix trace`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("step", type=_count, metavar="STEP", help="number of the step, from 1")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".json to write (RUN/trace-STEP.json)")


def score_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix score`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    parser.add_argument("data", metavar="DATA", help=".jsonl with rows of text, messages or input_ids")
    writes = ".jsonl to write: logprobs, tokens and sum of each row"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=writes)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter on top of the model")
    parser.add_argument("--batch-size", type=_count, default=8, metavar="N", help="rows per micro-batch (8)")
    parser.add_argument("--max-length", type=_count, default=1024, metavar="N", help="maximum tokens of a row (1024)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


def generate_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix generate`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
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
    slots = "completions sampled at a time: more memory, more speed, the same result"
    parser.add_argument("--slots", type=_count, metavar="N", help=slots)
    _reward_arguments(parser)
    best = "write rows to train on instead: the K best completions of each prompt (1), of equal ones the first"
    parser.add_argument("--best", type=_count, nargs="?", const=1, metavar="K", help=best)
    least = "write rows to train on instead: the completions with a reward of at least X; also with --best"
    parser.add_argument("--threshold", type=float, metavar="X", help=least)
    _sampling_arguments(parser, max_tokens=256)


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


def serve_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix serve`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    _adapter_argument(parser)
    listens = "address to listen on (127.0.0.1); whoever reaches it can have it load any folder that it can read"
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=listens)
    parser.add_argument("--port", type=_count, default=8000, metavar="PORT", help="port to listen on (8000)")
    longest = "maximum tokens of prompt and answer (the model's own)"
    parser.add_argument("--max-length", type=_count, metavar="N", help=longest)
    slots = "requests answered at a time: more memory, more speed, the same result"
    parser.add_argument("--slots", type=_count, metavar="N", help=slots)
    keeps = "let a run load adapters beside the weights, which then are kept twice"
    parser.add_argument("--enable-lora", action="store_true", help=keeps)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


def eval_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix eval`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
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
    slots = "completions sampled at a time: more memory, more speed, the same result"
    parser.add_argument("--slots", type=_count, metavar="N", help=slots)
    _adapter_argument(parser)
    _prompt_arguments(parser)


def quantize_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix quantize`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
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


def chat_arguments(parser: Parser) -> None:
    """Declares the arguments of `tunix chat`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, or the folder of a run")
    _adapter_argument(parser)
    _sampling_arguments(parser, max_tokens=1024)


def _packed_argument(parser: Parser) -> None:
    packed = "write rounded weights in few bits (compressed-tensors, which transformers and vLLM read); not for nf4"
    parser.add_argument("--packed", action="store_true", help=packed)


def _adapter_argument(parser: Parser) -> None:
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter on top of the model")


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
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation (float32)")


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
