"""Per-token log-probs of given rows under a model, computed by the training code, and `tunix score`, which writes them.

Nothing is truncated: a row that is too long is an error. The command writes one JSON object per row: `logprobs` (one
for each token after the first), `tokens` (their ids), `sum`.

Axes: T time.
"""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, MeshConfig, RowKind
from tunix.data.examples import to_example
from tunix.data.shapes import Rendering, detect_format
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.hf.source import check_vocabulary, loaded, pretrained, require_lm_head
from tunix.mesh import build_mesh, row_shards
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.progress import Display, readable
from tunix.types import Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic


@dataclass(frozen=True)
class RowScore:
    """The log-probs of one row under a model."""

    tokens: np.ndarray
    """`[T]` int32 ids, e.g. `[2, 17, 9]`."""
    logprobs: np.ndarray
    """`[T - 1]` float32 log-probs in nats of each token after the first, e.g. `[-1.2, -0.3]`."""

    @property
    def sum(self) -> float:
        """Total log-prob in nats of the tokens after the first, e.g. -1.5."""
        return float(self.logprobs.sum(dtype=np.float64))


def sequences_to_score(rows: Rows, tokenizer: Tokenizer | None, vocab_size: int, max_length: int) -> list[Sequence]:
    """Renders rows as sequences whose tokens after the first are all scored.

    Raises:
        UserError: a row is too long, too short, or invalid.
    """
    shape = detect_format(rows[0], {}, f"row 1 of {rows.name}")
    rendering = Rendering(shape, max_length=sys.maxsize, train_on=RowKind.ALL, vocab_size=vocab_size)
    return [_sequence(rows, index, tokenizer, rendering, max_length) for index in range(len(rows))]


def scored(
    model: Model,
    params: Params,
    mesh: Mesh,
    sequences: list[Sequence],
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[RowScore]:
    """Computes the log-probs of sequences, in their order.

    Args:
        batch_size: rows of a micro-batch.
        progress: receives the number of sequences that are done.
    """
    # One shape for all micro-batches, no longer than the rows need.
    length = -(-max(len(s.tokens) for s in sequences) // 64) * 64
    rows = -(-batch_size // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(model, Microbatcher(rows, mesh), length)
    scores: list[RowScore] = []
    size = 8 * batch_size
    for start in range(0, len(sequences), size):
        group = sequences[start : start + size]
        values = scorer.scores("logprobs", params, group, size=size)
        scores += [RowScore(x.tokens, logprobs[1:]) for x, logprobs in zip(group, values, strict=True)]
        progress(len(scores))
    return scores


def _sequence(rows: Rows, index: int, tokenizer: Tokenizer | None, rendering: Rendering, max_length: int) -> Sequence:
    where = f"row {index + 1} of {rows.name}"
    example = to_example(rows[index], tokenizer, rendering, where)
    if not isinstance(example, Kept):
        raise UserError(
            f"{where}: {example.detail or 'nothing to score in a row of fewer than two tokens; leave it out'}"
        )
    (sequence,) = example.sequences
    size = len(sequence.tokens)
    if size > max_length:
        raise UserError(f"{where} has {size} tokens, more than max_length (--max-length) {max_length}: raise it")
    return sequence


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
        batch_size: rows of a micro-batch.
        max_length: maximum tokens of a row; a longer one is an error.
        dtype: of the computation and the weights.

    Returns:
        The perplexity: exp of minus the mean log-prob over all tokens after the first of their row.

    Raises:
        UserError: the model, the rows or the output are not accessible.
    """
    refuse_out(out)
    rows = open_rows(data)
    source = pretrained(model, adapter)
    check_vocabulary(source)
    require_lm_head(source, model)
    mesh = build_mesh(MeshConfig())
    sequences = sequences_to_score(rows, source.tokenizer, source.decoder.vocab_size, max_length)
    with closing(Display("score", len(sequences), 0)) as display:
        network, params = loaded(source, dtype, mesh)
        scores = scored(network, params, mesh, sequences, batch_size, lambda done: display.update(done, {}))
    lines = [
        {"logprobs": [round(float(x), 7) for x in row.logprobs], "tokens": row.tokens[1:].tolist(), "sum": row.sum}
        for row in scores
    ]
    write_text_atomic(out, "".join(json.dumps(line) + "\n" for line in lines))
    total, count = sum(x.sum for x in scores), sum(x.logprobs.size for x in scores)
    value = perplexity(-total / count)
    print(f"{len(scores)} rows, {readable(count)} tokens: perplexity {value:.4f}, written to {out}")
    return value
