"""Experts beside dense ffns of the same active FLOPs: `python -m benchmarks.mixers --experts`, and `--decode`.

A mixture of 128 experts of which each token uses 8, against a dense ffn as wide as the 8 together. All take turns;
medians, and ratios to the dense one. The dense one reads 16 times fewer weights, and its gradients of them are as much
smaller: that a mixture's rows are few for each matrix is part of what is measured. `--decode` compares whole engines.

Axes: D model width, F ffn width of an expert, E experts, k experts of a token, n tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from benchmarks.rollout import engines, requests
from benchmarks.shapes import SHAPES
from benchmarks.train import interleaved
from tunix.models.config import EXPERTS, DecoderConfig, Experts
from tunix.models.expert_products import Routes, from_experts, in_rows, routes, to_experts
from tunix.util.exact import jit

NUMBER, ACTIVE, TOKENS = 128, 8, 2048
SIZES = ((512, 192), (1024, 768))
"""D and F."""
DEPTH, SLOTS, PROMPT, NEW = 2, (4, 16), 16, 64
"""Layers, numbers of slots, and tokens of each prompt and completion, where engines are compared."""
Inputs = tuple[Float[Array, "..."], ...]


def mixed(x: jax.Array, gates: jax.Array, ups: jax.Array, downs: jax.Array, weights: jax.Array, where: Routes) -> Any:
    """The ffn of experts, without its router."""
    gate, up = to_experts(x, gates, where), to_experts(x, ups, where)
    return from_experts(jax.nn.silu(gate) * up * in_rows(weights, where)[:, None], downs, where)


def dense(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The ffn as wide as the experts of a token together."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def random(number: int, *shape: int) -> jax.Array:
    """Random numbers of unit gain."""
    return jax.random.normal(jax.random.key(number), shape) * shape[-2] ** -0.5


def transposed(function: Callable[..., jax.Array], at: int, d: jax.Array, *inputs: Any) -> jax.Array:
    """The gradient of one of a function's inputs, given that of its output."""

    def of_one(x: jax.Array) -> jax.Array:
        return function(*inputs[:at], x, *inputs[at + 1 :])

    return jax.vjp(of_one, inputs[at])[1](d)[0]


def contenders(d: int, f: int) -> dict[str, tuple[Callable[..., Any], Inputs]]:
    """For each product a dense one (`dense/...`) and that of the experts (`experts/...`), and their inputs."""
    scores = jax.random.normal(jax.random.key(0), (TOKENS, NUMBER))
    chosen = jax.lax.top_k(scores, ACTIVE)[1]
    where = jit(lambda x: routes(x, NUMBER, jnp.ones(x.shape, bool)))(chosen)
    x, weights = random(1, TOKENS, d), jnp.full((TOKENS, ACTIVE), 1 / ACTIVE)
    banks = (random(2, NUMBER, d, f), random(3, NUMBER, d, f), random(4, NUMBER, f, d))
    wide = (random(5, d, ACTIVE * f), random(6, d, ACTIVE * f), random(7, ACTIVE * f, d))
    rows, columns = random(8, len(where.pairs), f), random(9, TOKENS, ACTIVE * f)

    def both(name: str, one: Callable, inputs: Inputs, other: Callable, others: Inputs) -> dict:
        return {f"dense/{name}": (one, inputs), f"experts/{name}": (other, others)}

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def loss(function: Callable[..., jax.Array], *inputs: Any) -> jax.Array:
        return jnp.sum(function(*inputs) ** 2)

    spread, every = partial(to_experts, where=where), tuple(range(4))
    ours = partial(mixed, weights=weights, where=where)
    return {
        **both("product", product, (x, wide[0]), spread, (x, banks[0])),
        **both("gradient of rows", partial(transposed, product, 0), (columns, x, wide[0]),
               partial(transposed, spread, 0), (rows, x, banks[0])),
        **both("gradient of matrices", partial(transposed, product, 1), (columns, x, wide[0]),
               partial(transposed, spread, 1), (rows, x, banks[0])),
        **both("ffn", dense, (x, *wide), ours, (x, *banks)),
        **both("ffn, gradients", jax.grad(partial(loss, dense), every), (x, *wide),
               jax.grad(partial(loss, ours), every), (x, *banks)),
    }  # fmt: skip


def measured(rounds: int) -> Table:
    """The table of all sizes."""
    title = f"{ACTIVE} of {NUMBER} experts, {TOKENS} tokens, {jax.devices()[0]}"
    table = Table("D x F", "of", "dense ms", "experts ms", "ratio", title=title)
    for d, f in SIZES:
        compiled = {
            name: (jit(function).lower(*inputs).compile(), inputs)
            for name, (function, inputs) in contenders(d, f).items()
        }
        work = {name: partial(_run, step, inputs) for name, (step, inputs) in compiled.items()}
        seconds = {name: np.array(each) for name, each in interleaved(work, rounds).items()}
        for name in (name.removeprefix("dense/") for name in seconds if name.startswith("dense/")):
            one, other = seconds[f"dense/{name}"], seconds[f"experts/{name}"]
            times = (f"{np.median(each) * 1e3:.1f}" for each in (one, other))
            table.add_row(f"{d} x {f}", name, *times, f"{np.median(other / one):.2f}")
    return table


def _run(step: Callable[..., Any], inputs: Inputs) -> None:
    jax.block_until_ready(step(*inputs))


def decoders() -> dict[str, DecoderConfig]:
    """A dense model, and one that is the same but for its ffn: experts of which each token uses as many weights."""
    wide = replace(SHAPES["small"].config, num_layers=DEPTH)
    assert wide.ffn % ACTIVE == 0
    experts = Experts(NUMBER, ACTIVE)
    return {"dense": wide, "experts": replace(wide, ffn=wide.ffn // ACTIVE, experts=experts, feed_forward=EXPERTS)}


def decoded(rounds: int) -> Table:
    """Tokens that a mixture's engine samples a second beside a dense model's of the same active size, by slots."""
    wide = SHAPES["small"].config
    shape = f"{DEPTH} layers, d {wide.d_model}, ffn {wide.ffn} or {ACTIVE} of {NUMBER} x {wide.ffn // ACTIVE}"
    table = Table("slots", "dense tokens/s", "experts tokens/s", "time, ratio", title=f"{shape}, {jax.devices()[0]}")
    made = {name: engines(SLOTS, config, length=PROMPT + NEW) for name, config in decoders().items()}
    for slots in SLOTS:
        asked = requests(np.full(slots, NEW), prompt=PROMPT)
        work: dict[str, Callable[[], Any]] = {name: partial(each[slots].run, asked) for name, each in made.items()}
        seconds = {name: np.array(each) for name, each in interleaved(work, rounds).items()}
        rates = (f"{slots * NEW / np.median(each):.0f}" for each in seconds.values())
        table.add_row(f"{slots}", *rates, f"{np.median(seconds['experts'] / seconds['dense']):.2f}")
    return table
