"""Disturbed at moments drawn anew each time, a run of every kind ends bit for bit like the one that nobody disturbs.

The moments follow from a seed, which is printed: EXACTNESS_SEED=... before pytest draws the same ones again, as far as
another machine is as fast. One row of `ROWS` is a kind of run; a new kind adds a row.
"""

import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run.test_ahead_run import does_what_is_recorded
from tests.run.test_distill_run import GIVEN
from tests.run.test_kill import Run, assert_same_end, no_process_left
from tests.run.test_oversample_run import OVER, write_world
from tests.run.test_preference_run import labelled, write_preferences
from tests.run.test_reward_run import write_reward
from tests.tiny_rl import POLICY, write_policy
from tests.tiny_runs import EVAL, model_folder, write_recipe, write_rows
from tunix.distributed.meeting import LOST

STEPS = 8
COMMON: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": 2, "keep": 3}, "eval.every": 3}
HELD: dict[str, Any] = {"data.eval": "held.jsonl", "eval.rows": 4}
QLORA = {"kind": "qlora", "rank": 4, "alpha": 8.0, "tile": 16}


def given(changes: dict[str, Any]) -> Callable[[Path], object]:
    """Rows of text."""
    return lambda folder: write_recipe(folder / "r.yaml", {**EVAL, **COMMON, **changes})


def on_base(write: Callable[[Path], object], name: str = "../base", **sizes: Any) -> Callable[[Path], object]:
    """A run with a model folder: beside it, since an exported adapter names its base."""

    def both(folder: Path) -> None:
        if not (folder / name).exists():
            model_folder(folder / name, **sizes)
        write(folder)

    return both


def policy(**changes: Any) -> Callable[[Path], object]:
    """Completions of the policy."""
    common = {key.replace(".", "__"): x for key, x in {**COMMON, **HELD}.items()}
    return lambda folder: write_policy(folder, **{**common, **changes})


def drafted(folder: Path) -> None:
    """GRPO of a model whose own head drafts, and is trained along."""
    from tests.mtp import folder_with_head  # imports transformers' models, in whatever tier this file is read

    if not (folder / "../base").exists():
        folder_with_head(folder / "../base")
    prompts = [[seed * place % 96 for place in range(1, 9)] for seed in range(1, 33)]
    write_rows(folder / "train.jsonl", [{"prompt_ids": prompt} for prompt in prompts])
    even = "def even(completion, completion_ids):\n    return sum(x % 2 for x in completion_ids) / 12\n"
    (folder / "rewards.py").write_text(even)
    model = {"path": "../base", "dtype": "float32", "mtp": "train"}
    changes = {"model": model, "rollout.speculate": 2, "reward.functions": ["rewards.py:even"]}
    write_recipe(folder / "r.yaml", {**POLICY, "steps": STEPS, "checkpoint": COMMON["checkpoint"], **changes})


GAME = "tunix.rollout.environments.guessing:secrets"
ROWS: dict[str, Callable[[Path], object]] = {
    "sft": given({"algorithm": {"name": "sft", "neftune_alpha": 5}, "optimizer.schedule": "cosine"}),
    "lora": given({"adapter": {"rank": 4, "dropout": 0.1}}),
    "qlora": on_base(given({"model": {"path": "../base"}, "adapter": QLORA})),
    "dpo": lambda folder: write_preferences(folder, **COMMON),
    "kto": lambda folder: write_preferences(folder, rows=labelled, algorithm={"name": "kto"}, **COMMON),
    "reward": lambda folder: write_reward(folder, "r.yaml", output="run", **COMMON),
    "distill": on_base(given(GIVEN), "teacher", hidden_size=48, vocab_size=288),
    "ppo": policy(algorithm={"name": "ppo", "critic_warmup": 1, "kl": 0.05, "kl_target": 2.0, "updates": 2}),
    "grpo": policy(algorithm={"name": "grpo", "group_size": 4, "updates": 2, "kl": 0.01}),
    "dapo with oversample": policy(**{key: x for key, x in OVER.items() if key not in COMMON}),
    "environments": policy(
        reward=None, rollout__environment={"name": "guessing"}, data__train=GAME, data__eval=GAME, batch_size=8
    ),
    "environments with oversample": lambda folder: write_world(folder, **COMMON, **HELD),
    "curriculum": policy(data__curriculum={"by": "success", "success": 0.6}),
    "drafting head": drafted,
    "asynchronous": policy(rollout__max_staleness=2, rollout__in_flight="continue"),
}


def end_some(run: Run, draw: random.Random) -> None:
    """Kills one process, or all of them. One that is left notices it and ends by itself; but before it has met the
    others, it would wait minutes for them."""
    met = "[Gloo]" in run.said
    for victim in draw.sample(run.processes, draw.randint(1, len(run.processes))):
        victim.kill()
    run.send(signal.SIGCONT)
    try:
        codes = run.codes(150 if met else 60)
    except subprocess.TimeoutExpired:
        assert not met, run.log
        run.send(signal.SIGKILL)
        codes = run.codes()
    # 0 where it had ended, 2 where it failed with the other, or had not met it.
    assert all(code in (0, 2, LOST, -signal.SIGKILL) for code in codes), (codes, run.log)


def killed(run: Run, draw: random.Random) -> None:
    """At a step, or a moment after it."""
    step, moment = draw.randint(1, STEPS - 1), draw.uniform(0, 0.3)
    if run.caught_while(lambda: run.steps >= step):
        run.send(signal.SIGCONT)
        time.sleep(moment)
    end_some(run, draw)


def killed_early(run: Run, draw: random.Random) -> None:
    """While it reads, compiles, restores or takes its first steps."""
    said, moment = len(run.log), draw.uniform(0, 4)
    run.caught_while(lambda: len(run.log) > said)
    run.send(signal.SIGCONT)
    time.sleep(moment)
    end_some(run, draw)


def killed_while_it_writes(run: Run, draw: random.Random) -> None:
    """A checkpoint, or the export, if it is caught at that."""
    exports = draw.random() < 0.3
    run.caught_while(lambda: not run.unfinished)  # what an earlier kill has left is gone
    run.send(signal.SIGCONT)
    run.caught_while(lambda: any(run.run.glob("export.tmp-*")) if exports else bool(run.unfinished))
    end_some(run, draw)


def asked_to_stop(run: Run, draw: random.Random) -> None:
    """One process, or all of them: all stop."""
    step = draw.randint(1, STEPS - 1)
    run.caught_while(lambda: run.steps >= step)
    run.send(signal.SIGCONT)
    asked = draw.choice([signal.SIGTERM, signal.SIGINT])
    for process in draw.sample(run.processes, draw.randint(1, len(run.processes))):
        process.send_signal(asked)
    assert all(code in (0, 130, -asked) for code in run.codes()), (run.codes(), run.log)  # the last while Python starts


def without_room(run: Run, draw: random.Random) -> None:
    """No file of a process, or of all of them, can grow any more, from some step on: as on a full disk. Its own words
    have no room either, so that it may end with Python's exit code for that."""
    step = draw.randint(1, STEPS - 1)
    if run.caught_while(lambda: run.steps >= step):
        for process in draw.sample(run.processes, draw.randint(1, len(run.processes))):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
        run.send(signal.SIGCONT)
    assert all(code in (0, 1, 2, LOST) for code in run.codes()), (run.codes(), run.log)


def cut(run: Run, draw: random.Random) -> None:
    """Killed, and the newest of several checkpoints has lost the end of its largest file: refused, and deleted. Or it
    goes on, where the file has bytes at its end that no value needs (those of tensorstore's earlier commits)."""
    killed(run, draw)
    if len(run.saved) < 2:
        return
    newest = run.run / "checkpoints" / max(run.saved, key=int)
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, draw.randrange(largest.stat().st_size))
    with no_process_left() as runs:
        runs.append(Run(run.folder, number=len(run.processes)))
        if any(runs[-1].codes()):
            assert 2 in runs[-1].codes(), run.log
            assert "the checkpoint cannot be read" in run.log
            shutil.rmtree(newest)


DISTURBANCES = (killed, killed_early, killed_while_it_writes, asked_to_stop, without_room, cut)
# Sampling ahead needs one process, or servers: tests/distributed/test_servers.py has it with two.
CASES = [(kind, number) for kind in ROWS for number in (1, 2) if (kind, number) != ("asynchronous", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_disturbed_anywhere_it_ends_like_the_uninterrupted_run(kind: str, number: int, tmp_path: Path):
    """In one process, and in two that divide the weights."""
    seed = int(os.environ.get("EXACTNESS_SEED", secrets.randbelow(10**6)))
    draw = random.Random(seed)
    ways = draw.sample(DISTURBANCES, 3)
    print(f"EXACTNESS_SEED={seed}: {kind}, {number}: {', '.join(way.__name__ for way in ways)}")
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    with no_process_left() as runs:

        def start(folder: Path) -> Run:
            runs.append(Run(folder, number=number))
            return runs[-1]

        for folder in (disturbed,) if kind == "asynchronous" else (whole, disturbed):
            folder.mkdir()
            ROWS[kind](folder)
            if number > 1:
                recipe = yaml.safe_load((folder / "r.yaml").read_text())
                (folder / "r.yaml").write_text(yaml.safe_dump({**recipe, "mesh": {"fsdp": number}}))
        if kind != "asynchronous":
            assert not any(start(whole).codes()), runs[-1].log
        for way in ways:
            way(start(disturbed), draw)
        assert not any(start(disturbed).codes()), runs[-1].log
    if kind == "asynchronous":  # what was sampled when is no promise: what its record says is
        does_what_is_recorded(disturbed)
    else:
        assert_same_end(disturbed / "run", whole / "run")
