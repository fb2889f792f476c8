"""`tunix score`: per-token log-probs of given rows under a model, by the very code that trains it.

One JSON object per row: `logprobs` (one for each token after the first), `tokens` (their ids), `sum`. Nothing is cut: a
row that is too long is an error.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tunix.config import DType, MeshConfig
from tunix.data.accounting import Kept
from tunix.data.examples import to_example
from tunix.data.shapes import Rendering, detect_format
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.hf.source import check_vocabulary, loaded, must_speak, pretrained
from tunix.mesh import build_mesh, row_shards
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Cut
from tunix.trainer.progress import Display, readable
from tunix.types import Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic


def score(
    model: str,
    data: str,
    out: Path,
    *,
    adapter: Path | None = None,
    batch_size: int = 8,
    max_length: int = 1024,
    dtype: DType = "float32",
) -> float:
    """Scores every row of `data` and writes `out`.

    Args:
        model: hub id, folder, or the folder of a run.
        data: rows of text, messages, prompt and completion, or input_ids.
        adapter: PEFT folder on top of the model.
        batch_size: rows per pass.
        max_length: tokens of a row at most; a longer one is an error.
        dtype: of the computation and the weights.

    Returns:
        The perplexity: exp of minus the mean log-prob over all tokens after the first of their row.

    Raises:
        UserError: the model, the rows or the output are not to be had.
    """
    refuse_out(out)
    rows = open_rows(data)
    source = pretrained(model, adapter)
    check_vocabulary(source)
    must_speak(source, model)
    mesh = build_mesh(MeshConfig())
    shape = detect_format(rows[0], {}, f"row 1 of {rows.name}")
    how = Rendering(shape, max_length=sys.maxsize, train_on="all", vocab_size=source.decoder.vocab_size)
    sequences = [_sequence(rows, index, source.tokenizer, how, max_length) for index in range(len(rows))]
    structure, params = loaded(source, dtype, mesh)
    # One shape for all passes, no longer than the rows need.
    length = min(max_length, -(-max(len(s.tokens) for s in sequences) // 64) * 64)
    rows_of_pass = -(-batch_size // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(structure, Cut(rows_of_pass, mesh), length)
    display = Display("score", len(sequences), 0)
    found: list[np.ndarray] = []
    for group in _groups(sequences, 8 * batch_size):
        found += [logprobs[1:] for logprobs in scorer.logprobs(params, group, size=8 * batch_size)]
        display.update(len(found), {})
    display.close()
    write_text_atomic(out, "".join(_line(s, logprobs) for s, logprobs in zip(sequences, found, strict=True)))
    total, count = sum(float(x.sum(dtype=np.float64)) for x in found), sum(x.size for x in found)
    reached = perplexity(-total / count)
    print(f"{len(found)} rows, {readable(count)} tokens: perplexity {reached:.4f}, written to {out}")
    return reached


def _sequence(rows: Rows, index: int, tokenizer: Tokenizer | None, how: Rendering, max_length: int) -> Sequence:
    where = f"row {index + 1} of {rows.name}"
    example = to_example(rows[index], tokenizer, how, where)
    if not isinstance(example, Kept):
        raise UserError(f"{where}: nothing to score in a row of fewer than two tokens; leave it out")
    (sequence,) = example.sequences
    size = len(sequence.tokens)
    if size > max_length:
        raise UserError(f"{where} has {size} tokens, more than --max-length {max_length}: raise it")
    return sequence


def _groups(sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def _line(sequence: Sequence, logprobs: np.ndarray) -> str:
    values = [round(float(x), 7) for x in logprobs]
    row = {"logprobs": values, "tokens": sequence.tokens[1:].tolist(), "sum": float(logprobs.sum(dtype=np.float64))}
    return json.dumps(row) + "\n"
