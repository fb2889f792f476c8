"""`python -m benchmarks.numerics`: the trainer's log-probs against the sampler's in bfloat16, and what equal ones cost.

Small random models of every family sample completions, whose log-probs the training step and `Client.logprobs` compute
again, those of a mixture with the experts that its tokens were sampled with: once with the rounding that tunix asks of
XLA (`tunix.util.exact`), once with XLA's default, each in a process of its own. For the times (the small Llama shape: a
step of 8 x 256 tokens, 16 x 64 sampled tokens) both take turns.

With `--depths 1024 16384` the same of completions after so many tokens, in one turn and in several, by what the cache
holds, and with its rounding replayed by the trainer (`rollout.replay.cache`).
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.models.families.table import FAMILIES

if TYPE_CHECKING:
    from benchmarks.shapes import Shape
    from tunix.config import CacheType
    from tunix.trainer.trainer import Trainer
    from tunix.types import Sequence

PROMPTS, GROUP, PROMPT, NEW = 2, 8, 16, 48
SIZES = {"d_model": 128, "ffn": 384, "num_layers": 4}
WINDOW = 16
MODES = ("exact", "free")
CACHES: tuple["CacheType", ...] = ("int8", "fp8")
"""Caches that round keys and values, beside that of the model's dtype."""


def shape_of(family: str) -> "Shape":
    """A small random model of a family; local layers see less than a sequence."""
    from benchmarks.shapes import Shape
    from tunix.models.families.table import small, with_sizes

    config = small(family)
    config = with_sizes(config, SIZES | ({} if config.window is None else {"window": WINDOW}))
    return Shape(family, config, rows=PROMPTS * GROUP, length=PROMPT + NEW, dtype="bfloat16")


def sampled(
    shape: "Shape", cache: "CacheType | None" = None, *, depth: int = PROMPT, turns: int = 1, replay: bool = False
) -> "tuple[Trainer, list[Sequence], np.ndarray]":
    """A trainer, completions of its sampler, and how far the trainer's log-probs are from these, before any update.

    Args:
        shape: the model and its rows; as many of these as completions.
        cache: what the sampler's keys and values are kept in; None for the model's dtype.
        depth: tokens of a prompt.
        turns: parts of a completion, with 16 tokens of an environment between two.
        replay: whether the trainer rounds keys and values as the cache does.
    """
    from tunix.types import Completion, Sampling, Sequence, requests_of

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        return None if len(so_far.turns) == turns else np.full(16, 3 + number, np.int32)

    client, rng = shape.trainer(reference=True, cache=cache, replay=replay), np.random.default_rng(0)
    group = min(GROUP, shape.rows)
    asked = list(rng.integers(3, shape.config.vocab_size, (shape.rows // group, depth)).astype(np.int32))
    client.publish()
    stops = tuple(range(0, shape.config.vocab_size, 3))[:16] if turns > 1 else ()
    requests = requests_of(asked, group, Sampling(max_tokens=NEW, stop_ids=stops), seed=0)
    sequences = []
    for request, one in zip(requests, client.run(requests, reply if turns > 1 else None), strict=True):
        mask = np.concatenate([np.zeros(depth, bool), one.drawn])
        logprobs = np.concatenate([np.zeros(depth, np.float32), one.logprobs])
        tokens, per_token = np.concatenate([request.prompt, one.tokens]), {"sampled": logprobs}
        sequences.append(Sequence(tokens, mask, per_token=per_token, experts=one.experts))
    scored = client.logprobs(sequences)
    apart = [np.abs(x - y.per_token["sampled"])[y.loss_mask] for x, y in zip(scored, sequences, strict=True)]
    return client, sequences, np.concatenate(apart)


def distances(family: str, cache: "CacheType | None" = None) -> dict[str, float]:
    """Absolute differences of log-probs, all before the first update.

    Those of the step and of the scorer from the sampler's, and those of the step from its own reference's.
    """
    import jax.numpy as jnp

    from tunix.data.packing import pack
    from tunix.types import Loss, LossInputs, LossOutputs, Term

    def look(inputs: LossInputs) -> LossOutputs:
        assert inputs.reference_logprobs is not None
        apart = jnp.abs(inputs.logprobs - inputs.batch.per_token["sampled"])
        drift = jnp.abs(inputs.logprobs - inputs.reference_logprobs)
        return LossOutputs({"loss": Term(-inputs.logprobs)}, {"mean": apart}, {"max": apart, "reference": drift})

    shape = shape_of(family)
    client, sequences, apart = sampled(shape, cache)
    step = client.step(pack(sequences, len(sequences), shape.length), Loss(look, reference=True))
    return {name: float(step[name]) for name in ("mean", "max", "reference")} | {"scorer": float(apart.max())}


def child(mode: str, families: list[str]) -> None:
    """Prints the results of `distances`, line by line; then the seconds of a step or a sampling for each line read."""
    from tunix.util import exact

    if mode == "free":
        exact.ROUNDS = {}
    import jax

    from benchmarks.shapes import SHAPES
    from benchmarks.train import LOSS
    from tunix.types import Sampling

    for family in families:
        print(json.dumps({"": distances(family), **{cache: distances(family, cache) for cache in CACHES}}), flush=True)
    shape = replace(SHAPES["small"], dtype="bfloat16")
    client, batch = shape.trainer(), shape.batch()
    prompts = list(shape.tokens()[:, :64])
    for line in sys.stdin:
        start = time.perf_counter()
        if line.startswith("step"):
            jax.block_until_ready((client.step(batch, LOSS), client.state))
        else:
            client.publish()
            client.sample(prompts, 2, Sampling(max_tokens=64), seed=0)
        print(json.dumps(time.perf_counter() - start), flush=True)


def by_depth(families: list[str], depths: list[int]) -> None:
    """Prints mean and largest mismatch of one completion for each depth, number of turns, and cache."""
    kinds = [("bfloat16", None, False), *((f"{x}{r}", x, bool(r)) for x in CACHES for r in ("", " replayed"))]
    table = Table("family", "depth", "turns", *(f"{name}: mean, max" for name, *_ in kinds))
    for family, depth, turns in ((x, depth, turns) for x in families for depth in depths for turns in (1, 4)):
        shape = replace(shape_of(family), rows=1, length=depth + NEW + 16 * (turns - 1))
        # So few ids that a quarter of the draws ends a turn.
        config = replace(shape.config, max_positions=max(shape.config.max_positions, shape.length), vocab_size=64)
        cells = []
        for _, cache, replay in kinds:
            *_, apart = sampled(replace(shape, config=config), cache, depth=depth, turns=turns, replay=replay)
            cells.append(f"{apart.mean():.1e} {apart.max():.1e}")
        table.add_row(family, str(depth), str(turns), *cells)
        print(family, depth, turns, *cells, sep=", ", file=sys.stderr, flush=True)
    Console(width=160).print(table)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed turns, after one that compiles")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--depths", nargs="*", type=int, default=[], help="tokens before a completion")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.depths:
        by_depth(arguments.families, arguments.depths)
        return
    if arguments.child:
        child(arguments.child, arguments.families)
        return
    command = [sys.executable, "-m", "benchmarks.numerics", "--families", *arguments.families, "--child"]
    console = Console(width=120)
    found = Table("family", *(f"{mode}: {name}" for mode in MODES for name in ("mean", "max", "scorer", "reference")))
    children = [
        subprocess.Popen([*command, mode], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for mode in MODES
    ]

    def answer(one: subprocess.Popen[str]) -> Any:
        assert one.stdout is not None
        return json.loads(one.stdout.readline())

    for family in arguments.families:
        numbers = [answer(one) for one in children]
        for cache in numbers[0]:
            of_cache = [one[cache] for one in numbers]
            cells = (f"{x[name]:.1e}" for x in of_cache for name in ("mean", "max", "scorer", "reference"))
            found.add_row(f"{family} {cache}", *cells)
    console.print(found)
    times = Table("what", *MODES, "exact / free")
    for what in ("step", "draw"):
        seconds = []
        for _ in range(arguments.rounds + 1):
            for one in children:
                assert one.stdin is not None
                print(what, file=one.stdin, flush=True)
                seconds.append(answer(one))
        by_mode = [np.array(seconds[2 + index :: 2]) for index in range(2)]
        ratio = np.median(by_mode[0] / by_mode[1])
        times.add_row(f"{what}, ms", *(f"{np.median(x) * 1e3:.0f}" for x in by_mode), f"{ratio:.2f}")
    console.print(times)
    for one in children:
        one.communicate("")


if __name__ == "__main__":
    main()
