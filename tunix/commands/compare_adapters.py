"""`tunix generate MODEL --adapter A --adapter B`: the same prompts to several adapters of one base, side by side.

The base is read once and stays as it is. The adapters lie beside it, unmerged, and share the engine's batches; one that
brings tables of its own, which no batch can mix, is drawn from after the others. Completion j of row i draws by
(seed, i n + j, token index) under every adapter, as with that adapter alone.
"""

import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunix.commands.generate import line, opened
from tunix.commands.progress import Bar
from tunix.commands.rejection_sampling import Question
from tunix.errors import UserError
from tunix.hf.base_fingerprint import foreign_base, rounding_of
from tunix.hf.source import as_rounded, beside
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.model import Params, is_adapter
from tunix.models.quantization.formats import Quantization
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Request
from tunix.types import Completion, Sampling
from tunix.util.atomic_io import write_text_atomic

Answers = dict[Path, list[Completion]]
"""Each adapter's completions, those of a prompt together."""


def compare(
    asked: InferenceOptions,
    adapters: List[Path],
    prompt: str | None,
    *,
    rows: str | None = None,
    out: Path | None = None,
    sampling: Sampling,
    n: int = 1,
    seed: int = 0,
) -> None:
    """Answers a prompt on the screen, or writes `out`: the lines of `tunix generate` with `adapter`, row by row.

    Args:
        asked: the model, without an adapter.
        adapters: PEFT folders; what else is asked is as in `generate`.

    Raises:
        UserError: the model, an adapter, the rows or the output are not to be had, or a setting means nothing.
    """
    if twice := {path for path in adapters if adapters.count(path) > 1}:
        raise UserError(f"--adapter {twice.pop()} is given twice")
    speaker, sampling, questions = opened(asked, prompt, rows, out, sampling)
    requests = [
        Request(question.tokens, sampling, seed, i * n + j) for i, question in enumerate(questions) for j in range(n)
    ]
    answers = _answers(speaker, adapters, requests)
    if out is None:
        for path, completions in answers.items():
            for number, completion in enumerate(completions, start=1):
                of = f", {number} of {n}" if n > 1 else ""
                print(f"--- {path}{of} ({completion.finish})\n{speaker.text(completion)}")
        return
    write_text_atomic(out, "".join(_lines(speaker, questions, answers, n)))
    number = len(requests) * len(adapters)
    print(f"{len(questions)} rows, {len(adapters)} adapters, {number} completions, written to {out}")


def _answers(speaker: InferenceModel, adapters: List[Path], requests: List[Request]) -> Answers:
    """All adapters' completions."""
    source = speaker.source
    if source.merged is not None:
        raise UserError(f"{speaker.asked.model} ends in an adapter: export it (tunix export) before adding others")
    assert source.folder is not None  # only recipes begin with random weights
    for doubt in (foreign_base(path, source.name, source.folder, source.decoder) for path in adapters):
        if doubt:
            print(doubt, file=sys.stderr)
    rounding = _rounding(adapters)
    model, params, mesh = speaker.weights()
    if rounding is not None:
        params = as_rounded(params, model.config, rounding)
    # All are read before the first is drawn from, so that the last one's mistake does not cost the others' time.
    read = {path: LoadedAdapter(*beside(model, params, mesh, path)) for path in adapters}
    decode = speaker.tokenizer.decode if speaker.tokenizer else None
    mixtures = list(_mixtures(read))
    moving = {name for tables, _ in mixtures for name in tables}
    engine = Engine(model, mesh, slots=speaker.slots, length=speaker.limit, decode=decode, moving=moving)
    answers: Answers = {}
    with closing(Bar("generate", len(requests) * len(adapters))) as bar:
        for version, (tables, laid) in enumerate(mixtures):
            engine.publish({**params, **tables}, version, adapters=laid)
            before = len(requests) * len(answers)

            def hear(number: int, _: np.ndarray, before: int = before) -> None:
                bar.show(before + max(0, number + 1 - speaker.slots))  # requests begin in their order

            found = engine.run([replace(one, adapter=name) for name in laid for one in requests], on_tokens=hear)
            answers |= {Path(name): found[i * len(requests) :][: len(requests)] for i, name in enumerate(laid)}
    return {path: answers[path] for path in adapters}


def _rounding(adapters: List[Path]) -> Quantization | None:
    """How the base was rounded that all adapters were trained on (QLoRA); None for as it is.

    Raises:
        UserError: they were trained on different ones.
    """
    found = {path: rounding_of(path) for path in adapters}
    if len(set(found.values())) > 1:
        told = {path: f"{how.base} in tiles of {how.tile}" if how else "no rounding" for path, how in found.items()}
        listed = "; ".join(f"{path}: {how}" for path, how in told.items())
        raise UserError(f"--adapter: their base was rounded differently while they trained ({listed}): ask each alone")
    return found[adapters[0]]


def _mixtures(read: Mapping[Path, LoadedAdapter]) -> Iterator[tuple[Params, dict[str, LoadedAdapter]]]:
    """(tables, adapters by name) that share batches: all that bring no tables, then each that does."""
    tables = {path: {name: x for name, x in laid.params.items() if not is_adapter(name)} for path, laid in read.items()}
    if plain := {str(path): laid for path, laid in read.items() if not tables[path]}:
        yield {}, plain
    for path, whole in tables.items():
        if whole:
            settings, params = read[path]
            yield (
                whole,
                {str(path): LoadedAdapter(settings, {name: x for name, x in params.items() if name not in whole})},
            )


def _lines(speaker: InferenceModel, questions: List[Question], answers: Answers, n: int) -> Iterator[str]:
    for row, question in enumerate(questions):
        for path, completions in answers.items():
            for sample, completion in enumerate(completions[row * n : (row + 1) * n]):
                yield line(speaker, row, sample, question.row, completion, {"adapter": str(path)})
