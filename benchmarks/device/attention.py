"""Attention alone: each kernel's forward and backward pass over one row of 16,384 tokens, packed and as one document.

What packing saves is read off both: eight documents see an eighth of what one sees.

Axes: B rows, T time, N query heads, K kv heads, H head dim, D documents.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

from benchmarks.device.rows import Row, Setting, Work, attempt
from benchmarks.device.speeds import measured, timed
from tunix.models.attention.attend import BY_NAME, attend, spec_of
from tunix.models.attention.inputs import Segments
from tunix.util.exact import jit

HEADS, KV_HEADS, DIM = 16, 8, 128
"""Those of Qwen3 0.6B."""
CALLS = 20
"""Of each turn, sent one after the other, so that the device does not wait for Python."""
DOCUMENTS = (8, 1)
TIMES = {"forward": 1.0, "forward and backward": 3.5}
"""The products of the passes in those of the forward pass, which has two; the backward pass has five."""


def rows(case: str, setting: Setting) -> Iterator[Row]:
    """A row for each implementation, packing and pass.

    Args:
        case: names of implementations, and cuDNN's through JAX, e.g. `mosaic, cudnn`.
        setting: how it runs.
    """
    for implementation, documents, passes in product(case.split(", "), DOCUMENTS, TIMES):
        name = f"{implementation}, {passes}, {documents} document{'s' if documents > 1 else ''}"
        yield attempt(name, partial(_row, name, implementation, passes, documents, setting))


def _row(name: str, case: str, passes: str, documents: int, setting: Setting) -> Row:
    length, heads = (512, (4, 2)) if setting.small else (16_384, (HEADS, KV_HEADS))
    keys = jax.random.split(jax.random.key(0), 4)
    numbers = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, pull = (
        jax.random.normal(key, (1, length, n, DIM), jnp.bfloat16) for key, n in zip(keys, numbers, strict=True)
    )
    columns, size = jnp.arange(length)[None], length // documents
    view = Segments(columns // size + 1, columns % size)
    if case == "cudnn" and (documents > 1 or setting.platform != "gpu"):
        return Row(name, "skipped", "it needs a GPU, and JAX's public function takes no documents")
    if case in BY_NAME and (reason := BY_NAME[case].lacks(spec_of(q, k, view, None))):
        return Row(name, "skipped", reason)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if case == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return attend(q, k, v, view._replace(attention=case), scale=DIM**-0.5)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, pull: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(mixed, q, k, v)[1](pull)

    call: Callable[[], object] = partial(jit(mixed), q, k, v)
    if passes != "forward":
        call = partial(jit(both), q, k, v, pull)
    seconds = [turn / CALLS for turn in timed(lambda: [call() for _ in range(CALLS)])]
    flops = TIMES[passes] * 2 * length * size * heads[0] * DIM
    return measured(name, seconds, flops=flops, work=(Work(flops, 0.0),))
