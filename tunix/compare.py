"""`tunix generate MODEL --adapter A --adapter B`: the same prompts to several adapters of one base, side by side.

The base is read once and stays as it is; each adapter is laid beside it, unmerged, and drawn from in turn. Completion j
of row i draws by (seed, i n + j, token index) under every adapter, as with that adapter alone.
"""

from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import closing
from pathlib import Path

from tunix.best import Question
from tunix.drawing import Bar
from tunix.errors import UserError
from tunix.files import write_text_atomic
from tunix.generate import line, opened
from tunix.lora.config import AdapterConfig
from tunix.models.model import is_adapter
from tunix.rollout.engine import Engine
from tunix.rollout.episode import Request
from tunix.source import beside
from tunix.speaker import Asked, Speaker
from tunix.types import Completion, Sampling

Answers = dict[Path, list[Completion]]
"""Each adapter's completions, those of a prompt together."""


def compare(
    asked: Asked,
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


def _answers(speaker: Speaker, adapters: List[Path], requests: List[Request]) -> Answers:
    """All adapters' completions; adapters of one kind share an engine, and its copy of the base."""
    model, params, mesh = speaker.weights()
    # All are read before the first is drawn from, so that the last one's mistake does not cost the others' time.
    read = [(path, *beside(model, params, mesh, path)) for path in adapters]
    decode = speaker.tokenizer.decode if speaker.tokenizer else None
    engine: Engine | None = None
    kind: AdapterConfig | None = None
    answers: Answers = {}
    with closing(Bar("generate", len(requests) * len(adapters))) as bar:
        for version, (path, settings, adapted, own) in enumerate(read):
            if engine is None or settings != kind:
                engine, kind = Engine(adapted, mesh, slots=speaker.slots, length=speaker.limit, decode=decode), settings
            engine.load({**params, **own}, version, moving=[name for name in own if not is_adapter(name)])
            answers[path] = engine.run(requests)
            bar.show((version + 1) * len(requests))
    return answers


def _lines(speaker: Speaker, questions: List[Question], answers: Answers, n: int) -> Iterator[str]:
    for row, question in enumerate(questions):
        for path, completions in answers.items():
            for sample, completion in enumerate(completions[row * n : (row + 1) * n]):
                yield line(speaker, row, sample, question.row, completion, {"adapter": str(path)})
