"""`tunix score`: per-token log-probs of given rows under a model, computed by the training code.

It writes one JSON object per row: `logprobs` (one for each token after the first), `tokens` (their ids), `sum`. Nothing
is truncated: a row that is too long is an error.
"""

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from tunix.config import DType, MeshConfig
from tunix.data.sources import open_rows
from tunix.hf.source import check_vocabulary, loaded, pretrained, require_lm_head
from tunix.inference.scoring import RowScore, scored, sequences_to_score
from tunix.mesh import build_mesh
from tunix.trainer.metrics import perplexity
from tunix.trainer.progress import Display, readable
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
        weights = loaded(source, dtype, mesh)
        scores = scored(*weights, mesh, sequences, batch_size, lambda done: display.update(done, {}))
    write_text_atomic(out, "".join(map(_line, scores)))
    total, count = sum(one.sum for one in scores), sum(one.logprobs.size for one in scores)
    value = perplexity(-total / count)
    print(f"{len(scores)} rows, {readable(count)} tokens: perplexity {value:.4f}, written to {out}")
    return value


def _line(one: RowScore) -> str:
    values = [round(float(x), 7) for x in np.asarray(one.logprobs)]
    return json.dumps({"logprobs": values, "tokens": one.tokens[1:].tolist(), "sum": one.sum}) + "\n"
