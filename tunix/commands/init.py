"""`tunix init`: writes a recipe for a model and rows of the user's, with the reason for each value in a comment.

The task follows from the columns of the first row, the lengths from rows as a run renders them, and whether all weights
train, or LoRA, from the arithmetic of `tunix plan`, which compiles nothing.
"""

import math
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tunix.data.examples import Examples
from tunix.data.shapes import ANSWERS, COMPLETIONS, LABELS, PAIRS, QUESTIONS, Shapes, detect_format, listed
from tunix.data.sources import Rows, open_held_out, open_rows
from tunix.data.types import Dropped, Kept
from tunix.errors import UserError
from tunix.recipe.notes import total_steps
from tunix.recipe.recipe import Recipe
from tunix.rollout.rewards.answers import last_number
from tunix.util.atomic_io import refuse_out, write_text_atomic
from tunix.util.chips import limit_of, number_of
from tunix.util.yaml_io import write_yaml


class Task(NamedTuple):
    """What `tunix init` knows of an algorithm."""

    columns: str
    """What its rows have, in words."""
    rates: tuple[float, float]
    """Usual learning rates of all weights, and of an adapter."""
    batch: int
    """Usual sequences, pairs or prompts of an update."""


TASKS = {
    "sft": Task("messages, prompt and completion, text, or input_ids", (1e-5, 2e-4), 32),
    "dpo": Task("chosen and rejected", (5e-6, 2e-5), 32),
    "reward": Task("chosen and rejected", (5e-6, 1e-4), 32),
    "kto": Task("prompt, completion and a label of true or false", (5e-6, 2e-5), 32),
    "grpo": Task("prompt and answer", (1e-6, 1e-5), 16),
}
READ, ROUND = 2000, 64
"""Rows whose lengths are looked at, and tokens of which a limit is a multiple."""
GIB = 2**30


def chosen(rows: Rows, algorithm: str | None) -> tuple[str, dict[str, str]]:
    """The algorithm for rows, and `data.columns`; asks on a terminal where several fit alike.

    Raises:
        UserError: none fits, the one that is asked for does not, or several do and nobody can be asked.
    """
    row = rows[0]
    question = next((name for name in QUESTIONS if isinstance(row.get(name), str | list)), "prompt")
    answer = next((name for name in ANSWERS if isinstance(row.get(name), str | list)), "completion")
    prompt = {} if question == "prompt" else {"prompt": question}
    alpaca = "instruction" in row and row.get("input")  # two columns that only a function can join
    both = {} if alpaca else prompt | ({} if answer == "completion" else {"completion": answer})
    wanted: dict[str, tuple[Shapes, dict[str, str]]] = {"dpo": (PAIRS, prompt), "reward": (PAIRS, prompt)}
    if row.get("label") in (True, False):  # 1 and 0 too
        wanted["kto"] = (LABELS, both)
    wanted["sft"] = (COMPLETIONS, both)
    # The algorithms that the row has the columns of, the likeliest first, each with `data.columns`.
    fits: dict[str, dict[str, str]] = {}
    for name, (shapes, columns) in wanted.items():
        with suppress(UserError):
            form = detect_format(row, columns, shapes=shapes)
            fits[name] = columns if form in ("prompt_completion", "pairs") and question in row else {}
    if question in row and "answer" in row:
        fits["grpo"] = prompt
    wants = "; ".join(f"{name} wants {task.columns}" for name, task in TASKS.items() if algorithm in (None, name))
    if not fits or (algorithm is not None and algorithm not in fits):
        what = "no task" if algorithm is None else f"no {algorithm}"
        raise UserError(f"{rows.name} fits {what}: it has the columns {listed(row)}; {wants}")
    # A label, or a pair, is there for nothing else; `prompt` beside `answer` asks for something that finds the answer.
    clear = [name for name in ("kto", "dpo") if name in fits] or (list(fits) if len(fits) == 1 else [])
    if not clear and "prompt" in row and fits["sft"] == {"completion": "answer"}:
        clear = ["grpo"]
    name = algorithm or "".join(clear[:1])
    while name not in fits:
        several = f"{rows.name} has the columns {listed(row)}, which fit {' and '.join(fits)}"
        if not sys.stdin.isatty():
            raise UserError(f"{several}: say which by --algorithm")
        try:
            name = input(f"{several}. Which one? ").strip()
        except EOFError:
            raise UserError(f"{several}: say which by --algorithm") from None
    return name, fits[name]


def init(model: str, data: str, out: Path | None, algorithm: str | None, topology: str | None) -> str:
    """Writes the recipe to `out`, or to a file named by the algorithm and the model, and returns a line about it.

    Args:
        model, data: as in `model.path` and `data.train`.
        algorithm: one of `TASKS`; None to go by the columns.
        topology: such as `h100:8`; None for the devices at hand.

    Raises:
        UserError: the file exists, the model or the rows are not there, the rows fit no task, or nothing fits.
    """
    rows = open_rows(data)
    name, columns = chosen(rows, algorithm)
    task, out = TASKS[name], out or Path(f"{name}_{Path(model).name}.yaml")
    refuse_out(out)
    print(f"{name}: reading the lengths of up to {READ:,} rows of {rows.name} ...", file=sys.stderr, flush=True)
    import jax  # and what imports it

    from tunix.plan.arithmetic import estimated
    from tunix.plan.subject import decoder_of
    from tunix.run.inputs import open_inputs
    from tunix.trainer.mesh_choice import memory_of
    from tunix.util.startup import prepare_jax

    limit = decoder_of(model).max_positions
    if topology is not None:
        memory, number, where, on_cpu = limit_of(topology), number_of(topology), topology, False
    else:
        prepare_jax()
        where, number, on_cpu = jax.devices()[0].device_kind, jax.device_count(), jax.default_backend() == "cpu"
        memory = memory_of(jax.devices()) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / number
    samples = name == "grpo"
    held = None
    with suppress(UserError):  # none of several splits is clearly the held-out one
        held = None if rows.split is None else open_held_out(data).split
    sections: dict[str, Any] = {
        "model": {"path": model, "dtype": "float32" if on_cpu else "bfloat16"},
        "data": {
            "train": data,
            "eval_split": None if held == rows.split else held,
            "columns": columns,
            "max_length": limit,
        },
        "algorithm": {"name": name},
        "batch_size": max([2, *(size for size in (4, 8, 16, 32) if size <= task.batch and 8 * size <= len(rows))]),
        "epochs": 3 if name == "sft" and len(rows) < 5000 else 1,
        "output": "runs/init",
    }
    if samples:
        sections["data"]["prompt_length"] = limit // 2
        texts = [str(rows[i]["answer"]) for i in range(min(len(rows), ROUND))]
        plain = "number" if all(map(last_number, texts)) else "exact_match"
        sections["reward"] = {"functions": ["gsm8k" if all("####" in text for text in texts) else plain]}
    with tempfile.TemporaryDirectory() as folder:
        inputs = open_inputs(Recipe.build(sections), Path(folder))
        tokenizer = inputs.source.tokenizer
        texts = [rows[0].get(columns.get(name, name)) for name in ("prompt", "completion")]
        chat = tokenizer is not None and tokenizer.chat_template is not None and isinstance(texts[0], str)
        sections["data"]["chat"] = chat
        draft = Recipe.build(sections)
        seen = list(Examples(inputs.train, tokenizer, draft.data, draft.algorithm.reads).first(READ))
    lengths = sorted(len(x.tokens) for example in seen if isinstance(example, Kept) for x in example.sequences)
    if not lengths:
        reasons = ", ".join(sorted({example.reason for example in seen if isinstance(example, Dropped)}))
        raise UserError(f"{rows.name}: none of the first {len(seen):,} rows can be trained on: {reasons}")
    middle, most = lengths[len(lengths) // 2], lengths[math.ceil(0.99 * len(lengths)) - 1]
    length = min(ROUND * math.ceil(most / ROUND), limit // 2 if samples else limit)
    of = f"{'prompts' if samples else 'sequences'} of {len(seen):,} rows"
    seen_lengths = f"{of}: half up to {middle} tokens, 99% up to {most}, the longest {lengths[-1]}"
    if samples:
        answer = min(512, limit - length)
        sections["data"] |= {"prompt_length": length, "completion_length": answer, "max_length": length + answer}
    else:
        sections["data"]["max_length"] = length

    print("trying what fits ...", file=sys.stderr, flush=True)
    # The first of these that fits: all weights before an adapter, whole micro-batches before single sequences.
    estimates: list[float] = []
    for adapter, micro in ((None, None), (None, 1), ("lora", None), ("lora", 1)):
        sections["adapter"], sections["micro_batch_size"] = adapter and {"kind": adapter, "rank": 16}, micro
        estimates.append(estimated(Recipe.build(sections), number) or math.inf)
        if estimates[-1] <= memory:
            break
    takes, has = (f"{size / GIB:.2f} GiB" for size in (estimates[-1], memory))
    has += f" of each of {number} x {where}"
    if estimates[-1] > memory:
        raise UserError(
            f"{model} does not fit: LoRA on one sequence at a time takes up to {takes}, of {has}, by `tunix plan`'s "
            "arithmetic: name more or larger devices, such as --on h200:8"
        )
    sections["optimizer"] = {"learning_rate": task.rates[sections["adapter"] is not None], "warmup": 0.03}
    steps = total_steps(len(rows), sections["batch_size"], sections["epochs"])
    why = {
        "model.dtype": "of the computation; what trains is kept in float32",
        "data.train": "`eval: FILE` beside it measures the model on the rows of another file",
        "data.eval_split": "rows that measure the model and are not trained on",
        "data.columns": "our names, and those of the rows",
        "data.max_length": "prompt and answer" if samples else seen_lengths,
        "data.prompt_length": seen_lengths,
        "data.completion_length": "room for an answer: raise it where rollout/truncated is above 0.1",
        "data.chat": "strings become turns of the model's chat template",
        "algorithm.name": f"the rows have {task.columns.partition(',')[0] if name == 'sft' else task.columns}",
        "reward.functions": "what the answers in the rows look like; others are in docs/guide/rewards.md",
        "adapter.kind": f"all weights would take up to {min(estimates[:2]) / GIB:.2f} GiB, of {has}",
        "micro_batch_size": "more at a time would not fit",
        "optimizer.learning_rate": f"usual for {name} of {'LoRA' if sections['adapter'] else 'all weights'}",
        "batch_size": f"of {len(rows):,} rows: an epoch has 8 updates or more where there are enough",
        "epochs": f"{steps:,} steps",
    }
    if sections["data"]["eval_split"] is not None:
        del why["data.train"]
    empty = (None, False, {})
    kept = {key: value for key, value in sections.items() if value not in empty and key != "output"}
    kept["data"] = {key: value for key, value in kept["data"].items() if value not in empty}
    path: list[str] = []
    lines = [
        f"# {name} of {model} on {data}, as `tunix init` wrote it.",
        "#",
        *(f"#   tunix {command}" for command in (f"check {out}", f"run {out} --tiny", f"run {out}")),
        "#",
        f"# Memory: up to {takes}, of {has}, by the arithmetic of `tunix plan`, which compiles it to say more.",
        "",
    ]
    for line in write_yaml(kept).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        lines.append(f"{line:<32} # {reason}" if (reason := why.get(".".join(path))) else line)
    write_text_atomic(out, "\n".join(lines) + "\n")
    return f"{out} is written: {name}, {steps:,} steps, up to {takes}; next: tunix check {out}"
