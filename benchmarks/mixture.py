"""`python -m benchmarks.mixture`: the cost of sampling with several adapters of one base in one batch.

The same 16 prompts are answered by the base alone, with one adapter, with four in turns, and with eight; with the four
also one after the other, a quarter of the prompts each, as an engine that has one adapter at a time would do it.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.adapters import NEW, PROMPT, SLOTS
from benchmarks.shapes import LORA, SHAPES, Shape
from benchmarks.train import interleaved
from tunix.config import DType, MeshConfig
from tunix.lora.adapt import adapt
from tunix.lora.multi_lora import LoadedAdapter
from tunix.mesh import build_mesh
from tunix.models.config import is_adapter
from tunix.models.model import Model
from tunix.rollout.engine.engine import Engine
from tunix.types import Request, Sampling


def engine_of(shape: Shape, number: int) -> Engine:
    """An engine with a random base and `number` random adapters."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(shape.config, dtype=shape.dtype)
    base = model.init(jax.random.key(0), dict.fromkeys(model.shapes, shape.dtype), mesh)
    own = Model(shape.config, dtype=shape.dtype, adapt=adapt(LORA, shape.config))
    dtypes: dict[str, DType] = {name: shape.dtype for name in own.shapes if is_adapter(name)}
    beside = {str(i): LoadedAdapter(LORA, own.init(jax.random.key(i + 1), dtypes, mesh)) for i in range(number)}
    engine = Engine(model, mesh, slots=SLOTS, max_length=PROMPT + NEW)
    engine.publish(base, 1, adapters=beside)
    return engine


def requests(shape: Shape, adapters: int) -> list[Request]:
    """A request for each prompt, the adapters in turns."""
    prompts = [row[:PROMPT] for row in np.resize(shape.tokens(), (SLOTS, PROMPT))]
    sampling = Sampling(max_tokens=NEW)
    names = [str(i % adapters) if adapters else None for i in range(SLOTS)]
    return [Request(prompts[i], sampling, 0, i, adapter=names[i]) for i in range(SLOTS)]


def contenders(shape: Shape) -> dict[str, Callable[[], object]]:
    """The pieces of work that take turns."""
    engines = {number: engine_of(shape, number) for number in (0, 1, 4, 8)}
    quarters = [[one for one in requests(shape, 4) if one.adapter == str(i)] for i in range(4)]
    kinds = {0: "base alone", 1: "one adapter", 4: "four, mixed", 8: "eight, mixed"}
    work = {kinds[number]: partial(engine.run, requests(shape, number)) for number, engine in engines.items()}
    return {**work, "four, one after the other": lambda: [engines[4].run(quarter) for quarter in quarters]}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which models")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    arguments = parser.parse_args()
    for shape in (SHAPES[name] for name in arguments.shapes):
        seconds = interleaved(contenders(shape), arguments.rounds)
        one = np.array(seconds["one adapter"])
        found = Table("", "ms", "of one adapter", "tokens/s", title=f"{shape.name}: {SLOTS} prompts, {NEW} tokens each")
        for kind, own in seconds.items():
            ratio, median = np.median(np.array(own) / one), float(np.median(own))
            found.add_row(kind, f"{median * 1e3:.0f}", f"{ratio:.2f}", f"{SLOTS * NEW / median:.0f}")
        Console(width=100).print(found)


if __name__ == "__main__":
    main()
