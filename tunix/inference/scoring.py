"""Per-token log-probs of given rows under a model, computed by the training code, and `tunix score`, which writes them.

Nothing is truncated: a row that is too long is an error. The command writes one JSON object per row: `logprobs` (one
for each token after the first), `tokens` (their ids), `sum`.

Axes: T time.
"""

import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.mesh import row_shards
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.progress import Display, readable
from tunix.types import Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic


def sequences_to_score(rows: Rows, tokenizer: Tokenizer | None, vocab_size: int, max_length: int) -> list[Sequence]:
    """Renders rows as sequences whose tokens after the first are all scored.

    Raises:
        UserError: a row is too long, too short, or invalid.
    """
    examples = Examples(rows, tokenizer, DataConfig(train="", max_length=sys.maxsize), RowKind.ALL, vocab_size)
    sequences = []
    for index in range(len(rows)):
        where, example = f"row {index + 1} of {rows.name}", examples[index]
        if not isinstance(example, Kept):
            reason = example.detail or "nothing to score in a row of fewer than two tokens; leave it out"
            raise UserError(f"{where}: {reason}")
        (sequence,) = example.sequences
        if (size := len(sequence.tokens)) > max_length:
            raise UserError(f"{where} has {size} tokens, more than max_length (--max-length) {max_length}: raise it")
        sequences.append(sequence)
    return sequences


def token_scores(
    model: Model,
    params: Params,
    mesh: Mesh,
    sequences: List[Sequence],
    what: Literal["logprobs", "values"] = "logprobs",
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> list[np.ndarray]:
    """The `[T]` log-probs, or values, of each sequence's tokens, in shapes that compile once.

    Args:
        batch_size: rows of a micro-batch.
        progress: receives the numbers of sequences and of tokens that are done.
    """
    # One shape for all micro-batches, no longer than the rows need.
    length = -(-max(len(sequence.tokens) for sequence in sequences) // 64) * 64
    rows = -(-batch_size // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(model, Microbatcher(rows, mesh), length)
    scores: list[np.ndarray] = []
    size, tokens = 8 * batch_size, 0
    for start in range(0, len(sequences), size):
        group = sequences[start : start + size]
        scores += scorer.scores(what, params, group, size=size)
        tokens += sum(len(sequence.tokens) for sequence in group)
        progress(len(scores), tokens)
    return scores


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
    """Scores every row of `data` and writes `out`; the options are those of `LoadedModel.score` and `tunix.load`.

    Returns:
        The perplexity: exp of minus the mean log-prob over all tokens after the first of their row.

    Raises:
        UserError: the model, the rows or the output are not accessible.
    """
    refuse_out(out)
    rows = open_rows(data)
    inference = InferenceModel(InferenceOptions(model, adapter, dtype))
    require_lm_head(inference.source, model)
    sequences = sequences_to_score(rows, inference.tokenizer, inference.source.decoder.vocab_size, max_length)
    with closing(Display("score", len(sequences), 0)) as display:
        scores = token_scores(
            *inference.weights(),
            sequences,
            batch_size=batch_size,
            progress=lambda done, _: display.update(done, {}),
        )
    sums = [float(x[1:].sum(dtype=np.float64)) for x in scores]
    lines = [
        {"logprobs": [round(float(x), 7) for x in row[1:]], "tokens": sequence.tokens[1:].tolist(), "sum": total}
        for sequence, row, total in zip(sequences, scores, sums, strict=True)
    ]
    write_text_atomic(out, "".join(json.dumps(line) + "\n" for line in lines))
    count = sum(len(row) - 1 for row in scores)
    value = perplexity(-sum(sums) / count)
    print(f"{len(scores)} rows, {readable(count)} tokens: perplexity {value:.4f}, written to {out}")
    return value
