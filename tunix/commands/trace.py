"""`tunix trace`: what a step of a run on completions spent its time on, as a chart for https://ui.perfetto.dev.

A run writes `spans.jsonl`: for each step its activities, such as sampling, waiting for rewards and updates, each with
the thread that was busy with it. The chart has a row for each thread. Of an asynchronous run a step's completions were
sampled while earlier steps were learned from: its own sampling is shown, and all that happened while it was learned
from.
"""

import json
from pathlib import Path
from typing import Any

from tunix.errors import UserError
from tunix.rollout.types import SPANS, Span
from tunix.util.atomic_io import read_rows, refuse_out, write_text_atomic


def trace(run: Path, step: int, out: Path | None = None) -> Path:
    """Writes a step's activities in Chrome's trace format, which Perfetto opens; returns the file.

    Args:
        run: the run folder.
        step: the step's number, from 1.
        out: the file; None for `trace-STEP.json` in the run folder, which may be written again.

    Raises:
        UserError: the run has recorded no such step, or the file exists.
    """
    steps = {row["step"]: [Span(*span) for span in row["spans"]] for row in read_rows(run / SPANS)}
    if step not in steps:
        there = (
            f"it has recorded steps {min(steps)} to {max(steps)}" if steps else "only runs on completions record any"
        )
        raise UserError(f"{run / SPANS} has nothing of step {step}: {there}")
    if out is not None:
        refuse_out(out)
    # The activities of the step, and of others meanwhile, in microseconds since the first of them.
    learned = [span for span in steps[step] if span.name == "update"] or steps[step]
    opened, ended = min(span.start for span in learned), max(span.end for span in learned)
    shown = [
        (number, span)
        for number, spans in steps.items()
        for span in spans
        if number == step or (span.end > opened and span.start < ended)
    ]
    begin = min(span.start for _, span in shown)
    threads = sorted({span.thread for _, span in shown}, key=lambda name: (name != "MainThread", name))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for number, name in enumerate(threads)
    ]
    for number, span in shown:
        times = {"ts": round(1e6 * (span.start - begin)), "dur": round(1e6 * (span.end - span.start))}
        about = {"name": span.name, "cat": f"step {number}", "args": {"step": number}}
        events.append({"ph": "X", **about, "pid": 1, "tid": threads.index(span.thread), **times})
    file = out or run / f"trace-{step}.json"
    write_text_atomic(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return file
