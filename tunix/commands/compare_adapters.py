"""`tunix generate MODEL --adapter A --adapter B`: answers the same prompts with several adapters of one base.

The base is read once and is not changed. The adapters are loaded unmerged and share the engine's batches; one with its
own embeddings, which cannot be mixed within a batch, samples after the others. Completion j of row i depends on
(seed, i n + j, token index) with every adapter, as with that adapter alone.
"""

import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunix.commands.generate import Question, line, open_questions
from tunix.commands.sampling import Bar
from tunix.errors import UserError
from tunix.hf.peft_folder import foreign_base, rounding_of
from tunix.hf.source import as_rounded, beside
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.model import Params
from tunix.models.param_names import is_adapter
from tunix.models.quantization.formats import Quantization
from tunix.rollout.engine.engine import Engine
from tunix.types import Completion, Request, Sampling
from tunix.util.atomic_io import write_text_atomic

Completions = dict[Path, list[Completion]]
"""Each adapter's completions, ordered by prompt and sample."""


def compare(
    options: InferenceOptions,
    adapters: List[Path],
    prompt: str | None,
    *,
    rows: str | None = None,
    out: Path | None = None,
    sampling: Sampling,
    n: int = 1,
    seed: int = 0,
) -> None:
    """Prints the answers to a prompt, or writes those to rows as lines of `tunix generate` with a field `adapter`.

    Args:
        options: the model, without an adapter.
        adapters: PEFT folders; the other arguments are as in `generate`.

    Raises:
        UserError: the model, an adapter, the rows or the output are not accessible, or a setting is invalid.
    """
    if twice := {path for path in adapters if adapters.count(path) > 1}:
        raise UserError(f"--adapter {twice.pop()} is given twice")
    inference, sampling, questions = open_questions(options, prompt, rows, out, sampling)
    requests = [
        Request(question.tokens, sampling, seed, i * n + j) for i, question in enumerate(questions) for j in range(n)
    ]
    answers = _sampled(inference, adapters, requests)
    if out is None:
        for path, completions in answers.items():
            for number, completion in enumerate(completions, start=1):
                of = f", {number} of {n}" if n > 1 else ""
                print(f"--- {path}{of} ({completion.finish})\n{inference.text(completion)}")
        return
    write_text_atomic(out, "".join(_lines(inference, questions, answers, n)))
    number = len(requests) * len(adapters)
    print(f"{len(questions)} rows, {len(adapters)} adapters, {number} completions, written to {out}")


def _sampled(inference: InferenceModel, adapters: List[Path], requests: List[Request]) -> Completions:
    """Samples the completions of all adapters."""
    source = inference.source
    if source.merged is not None:
        raise UserError(f"{inference.options.model} ends in an adapter: export it (tunix export) before adding others")
    assert source.folder is not None  # only recipes start from random weights
    for warning in (foreign_base(path, source.name, source.folder, source.decoder) for path in adapters):
        if warning:
            print(warning, file=sys.stderr)
    rounding = _rounding(adapters)
    model, params, mesh = inference.weights()
    if rounding is not None:
        params = as_rounded(params, model.config, rounding)
    # All are loaded before the first one samples, so that a mistake in the last one is reported at once.
    loaded = {path: LoadedAdapter(*beside(model, params, mesh, path)) for path in adapters}
    decode = inference.tokenizer.decode if inference.tokenizer else None
    mixtures = list(_mixtures(loaded))
    moving = {name for tables, _ in mixtures for name in tables}
    engine = Engine(model, mesh, slots=inference.slots, max_length=inference.limit, decode=decode, moving=moving)
    completions: Completions = {}
    with closing(Bar("generate", len(requests) * len(adapters))) as bar:
        for version, (tables, batched) in enumerate(mixtures):
            engine.publish({**params, **tables}, version, adapters=batched)
            before = len(requests) * len(completions)

            def show(number: int, _: np.ndarray, before: int = before) -> None:
                bar.show(before + max(0, number + 1 - inference.slots))  # requests start in order

            sampled = engine.run([replace(one, adapter=name) for name in batched for one in requests], on_tokens=show)
            completions |= {Path(name): sampled[i * len(requests) :][: len(requests)] for i, name in enumerate(batched)}
    return {path: completions[path] for path in adapters}


def _rounding(adapters: List[Path]) -> Quantization | None:
    """The rounding of the base that all adapters were trained on (QLoRA); None without rounding.

    Raises:
        UserError: they were trained on bases with different rounding.
    """
    roundings = {path: rounding_of(path) for path in adapters}
    if len(set(roundings.values())) > 1:
        texts = {
            path: f"{one.base} in tiles of {one.tile}" if one else "no rounding" for path, one in roundings.items()
        }
        listed = "; ".join(f"{path}: {text}" for path, text in texts.items())
        raise UserError(f"--adapter: their base was rounded differently while they trained ({listed}): ask each alone")
    return roundings[adapters[0]]


def _mixtures(loaded: Mapping[Path, LoadedAdapter]) -> Iterator[tuple[Params, dict[str, LoadedAdapter]]]:
    """Groups adapters that share batches as (embeddings, adapters by name): all without embeddings, then each other."""
    tables = {path: {name: x for name, x in one.params.items() if not is_adapter(name)} for path, one in loaded.items()}
    if plain := {str(path): one for path, one in loaded.items() if not tables[path]}:
        yield {}, plain
    for path, table in tables.items():
        if table:
            settings, params = loaded[path]
            yield (
                table,
                {str(path): LoadedAdapter(settings, {name: x for name, x in params.items() if name not in table})},
            )


def _lines(inference: InferenceModel, questions: List[Question], answers: Completions, n: int) -> Iterator[str]:
    for row, question in enumerate(questions):
        for path, completions in answers.items():
            for sample, completion in enumerate(completions[row * n : (row + 1) * n]):
                yield line(inference, row, sample, question.row, completion, {"adapter": str(path)})
