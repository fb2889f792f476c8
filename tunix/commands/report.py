"""`tunix report`: one HTML file about a run, or two runs overlaid, which opens from disk without a network.

The files of a run folder -> `facts_of` (what was recorded, made small while it is read) -> `alarms_of` -> JSON inside
`report.html`, whose script draws it as SVG. No library makes the page: a template engine would escape HTML, and no text
here becomes HTML; a plotting library is a megabyte or more for lines and bars. What a model wrote is hostile: it is in
the page as JSON in which `<` is escaped, and the script writes it as text nodes. The page's policy lets no other script
run than that one, by its hash, and nothing be fetched.
"""

import base64
import hashlib
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from tunix.errors import UserError
from tunix.recipe.recipe import flattened
from tunix.util.atomic_io import SAMPLES, complete_lines, reading, refuse_out, write_text_atomic
from tunix.util.yaml_io import read_mapping

Row = dict[str, Any]
Item = TypeVar("Item")

TEMPLATE = Path(__file__).with_name("report.html")
READ = {"metrics.jsonl": 12_000_000, SAMPLES: 32_000_000, "spans.jsonl": 4_000_000, "judge.jsonl": 4_000_000}
"""Bytes of each file that are parsed, about; of a longer one every n-th step is."""
MOST_EVALUATIONS = 1_000
"""Rows with evaluations that are read whatever their step."""
POINTS, POINTS_OF_ALL = 400, 30_000
"""Maximum points of a curve, and of all curves of the page."""
TEXT, ITEMS = 6_000, 1_500
"""Characters of a text and items of a list beyond which the page leaves the rest out."""
SAMPLE_BYTES, SPAN_BYTES, VERDICT_BYTES, RECIPE_BYTES = 2_000_000, 300_000, 200_000, 200_000
"""Bytes of the page for each, of all runs together."""
STEP = re.compile(rb'\{"step": (\d+)[,}]')
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""Letters that could end an element, and halves of letters, which UTF-8 does not have."""
ROWS_OF_DATA = re.compile(r"(?:^|\s)(rows: \d+ of the first \d+: .*)")
"""What the log says of rows that were dropped or cut (`run/recorder.py`)."""


@dataclass(frozen=True)
class Alarm:
    """A rule over the metrics of a run, of which the first fifth is compared with the last."""

    title: str
    """What it looks for, e.g. `entropy collapse`."""
    metrics: tuple[str, ...]
    """The metrics that it reads; without one of them it says nothing."""
    rule: str
    """When it is raised, in words."""
    raised: Callable[..., bool]
    """The same as code: of each metric the mean of its first fifth and of its last."""
    meaning: str
    """What it may mean."""
    remedy: str
    """What to do."""


ALARMS = (
    Alarm(
        "entropy collapse",
        ("policy/entropy",),
        "below a quarter of what it was",
        lambda entropy: entropy[1] < 0.25 * entropy[0],
        "The policy samples nearly the same answers, so that groups have no differences left to learn from.",
        "Raise algorithm.clip_high, add entropy_bonus or entropy_target, or lower optimizer.learning_rate.",
    ),
    Alarm(
        "length drift",
        ("rollout/length",),
        "more than 1.5 times, or less than half, of what it was",
        lambda length: not 0.5 * length[0] <= length[1] <= 1.5 * length[0],
        "The task may want such answers, or the reward pays for their length alone: a sign of reward hacking.",
        "Read the longest and the best samples. If held-out rewards do not rise: preset dr_grpo, overlong_buffer.",
    ),
    Alarm(
        "repetition drift",
        ("samples/repetition",),
        "0.15 above what it was",
        lambda repetition: repetition[1] > repetition[0] + 0.15,
        "Answers repeat themselves: the reward is paid for words that say nothing new, a sign of reward hacking.",
        "Read the samples that repeat most, give the reward a penalty for repetition, or add algorithm.kl.",
    ),
    Alarm(
        "held-out reward falls",
        ("reward/mean", "eval/reward"),
        "reward/mean rises while eval/reward falls",
        lambda trained, held_out: trained[1] > trained[0] and held_out[1] < held_out[0],
        "What is learned of the training prompts does not carry over: a sign of overfitting or of reward hacking.",
        "Take an earlier checkpoint, more prompts, algorithm.kl, or a lower learning rate.",
    ),
    Alarm(
        "dead groups",
        ("reward/signal",),
        "below 0.3: in more than 70% of the groups all rewards are equal",
        lambda signal: signal[1] < 0.3,
        "Prompts are too hard or too easy, or the reward does not tell answers apart: such groups teach nothing.",
        "Choose prompts of medium difficulty (data.curriculum), a larger group_size, or a finer reward.",
    ),
    Alarm(
        "truncated answers",
        ("rollout/truncated",),
        "above 0.1",
        lambda truncated: truncated[1] > 0.1,
        "Answers are cut off at the limit before they end, and are scored as if they had.",
        "Raise data.completion_length, or set algorithm.mask_truncated or overlong_buffer.",
    ),
    Alarm(
        "failed rewards",
        ("reward/failed",),
        "above 0.02",
        lambda failed: failed[1] > 0.02,
        "A reward raised an error or took too long, and its samples are left out.",
        "The samples below, filtered by failed rewards, have the reasons: fix the function, or raise its deadline.",
    ),
    Alarm(
        "mismatch trend",
        ("mismatch/mean",),
        "above 0.001 and twice what it was",
        lambda mismatch: mismatch[1] > max(0.001, 2 * mismatch[0]),
        "The sampler's log-probs move away from the trainer's: gradients are of another policy than the one sampled.",
        "Set algorithm.correction to truncate or mask, sample in the dtype of the trainer, or lower the rate.",
    ),
    Alarm(
        "stale tokens",
        ("rollout/stale",),
        "above 0.3",
        lambda stale: stale[1] > 0.3,
        "Much of what is learned from was sampled by earlier weights.",
        "Lower rollout.max_staleness or rollout.oversample, or set algorithm.correction.",
    ),
)


def reports(run: Path, other: Path | None = None, out: Path | None = None, watch: bool = False) -> Iterator[Path]:
    """Writes the report; yields its path after each time.

    Args:
        run: the run folder.
        other: that of a second run, which is drawn over the first.
        out: the file; None for `report.html` in the run folder, which may be written again.
        watch: whether to look at the runs every few seconds from then on, and to write it again where they went on.

    Raises:
        UserError: a folder is no run, is damaged or has recorded nothing, or the runs have no metric in common.
    """
    if out is not None:
        refuse_out(out)
    file, before = out or run / "report.html", None
    runs = [run] if other is None else [run, other]
    while True:
        files = [folder / name for folder in runs for name in READ]
        sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
        if sizes != before:
            write_text_atomic(file, page(runs, watch))
            yield file
        if not watch:
            return
        before = sizes
        time.sleep(5.0)


def page(runs: List[Path], watch: bool = False) -> str:
    """The report of one or two runs as HTML; errors as of `reports`. `watch`: whether it can load itself again."""
    facts = [facts_of(run, len(runs)) for run in runs]
    # As much of their paths as tells them apart.
    paths = [run.resolve().parts for run in runs]
    length = next((n for n in range(1, len(paths[0])) if len({path[-n:] for path in paths}) == len(runs)), 1)
    facts = [{"name": "/".join(path[-length:]), **run} for path, run in zip(paths, facts, strict=True)]
    measured = [{name for name in run["curves"] if not name.startswith(("time/", "perf/"))} for run in facts]
    if len(runs) > 1 and not measured[0] & measured[1]:
        raise UserError(f"{runs[0]} and {runs[-1]} have no metric in common, so that there is nothing to compare")
    said = {"runs": facts, "watch": watch, "written": time.strftime("%Y-%m-%d %H:%M:%S")}
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].rpartition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    begin, _, end = template.replace("SCRIPT_DIGEST", digest).partition("REPORT_DATA")
    return begin + _json(said) + end


def facts_of(run: Path, share: int = 1) -> Row:
    """What the page says of a run, made small: `share` is among how many runs the page's bytes are divided.

    Raises:
        UserError: the folder is no run, is damaged or has recorded nothing.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    if not (run / "metrics.jsonl").is_file() and (stages := sorted(run.glob("*/metrics.jsonl"))):
        names = ", ".join(str(path.parent) for path in stages)
        raise UserError(f"{run} is a run of several stages, each of which has a report: {names}")
    recipe = {key: _shortened(x) for key, x in flattened(read_mapping(run / "recipe.yaml"))}
    series = defaultdict[str, list[tuple[int, float]]](list)
    with reading(run):
        rows, every = _rows(run / "metrics.jsonl")
        for row in rows:
            for name in sorted(row.keys() - {"step"}):
                if isinstance(value := row[name], int | float) and math.isfinite(value):
                    series[name].append((row["step"], float(value)))
        samples, samples_every = _rows(run / SAMPLES)
        repetition = defaultdict[int, list[float]](list)
        for row in samples:
            words = row["completion"].split() if isinstance(row["completion"], str) else row["completion"]
            fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
            # The share of an answer's four-word sequences that it had before.
            row["repetition"] = 1 - len(set(fours)) / len(fours) if fours else 0.0
            if mismatch := row.get("per_token", {}).get("mismatch"):
                row["mismatch"] = max(map(abs, mismatch))
            if "rewards" in row and "task" not in row:
                repetition[row["step"]].append(row["repetition"])
        if repetition:
            series["samples/repetition"] = [(step, fmean(values)) for step, values in sorted(repetition.items())]
        spans, _ = _rows(run / "spans.jsonl")
        for row in spans:
            begin = min(span[2] for span in row["spans"])
            row["spans"] = [(name, thread, start - begin, end - begin) for name, thread, start, end in row["spans"]]
        verdicts = [row["verdict"] for row in _rows(run / "judge.jsonl")[0]]
        # What it said of rows that were dropped or cut.
        log = (run / "log.txt").read_text("utf-8", "replace").splitlines() if (run / "log.txt").is_file() else []
        # The samples that the page has room for, in the order of the file: the worst of each kind, then whole steps.
        kinds: tuple[Callable[[Row], float], ...] = (
            lambda row: row.get("mismatch", 0.0),
            lambda row: row.get("tokens", 0),
            lambda row: len(row.get("failures", ())),
            lambda row: row["repetition"],
        )
        order = [i for kind in kinds for i in sorted(range(len(samples)), key=lambda i: -kind(samples[i]))[:10]]
        by_step = [[*steps] for _, steps in groupby(range(len(samples)), key=lambda i: samples[i]["step"])]
        order += [i for step in _coarse_to_fine(by_step) for i in step]
        shown = _within([(i, _shortened(samples[i])) for i in dict.fromkeys(order)], SAMPLE_BYTES // share)
        if not series:
            raise UserError(f"{run} has recorded no metrics yet: the first row is written after the first step")
        # Points `[step, value]` of each metric; of too many the neighbours are one, `[step, mean, lowest, highest]`.
        limit = max(1, min(POINTS, POINTS_OF_ALL // share // len(series)))
        curves = defaultdict[str, list[list[Any]]](list)
        for name, points in list(series.items())[: POINTS_OF_ALL // share]:
            size = math.ceil(len(points) / limit)
            for start in range(0, len(points), size):
                part = points[start : start + size]
                values = [value for _, value in part]
                spread = (min(values), max(values)) if size > 1 else ()
                curves[name].append([part[-1][0], *map(_rounded, (fmean(values), *spread))])
        return {
            "step": rows[-1]["step"],
            "steps": recipe.get("steps"),
            "every": every,
            "curves": curves,
            "recipe": dict(_within(list(recipe.items()), RECIPE_BYTES // share)),
            "data": {name: points[-1][1] for name, points in series.items() if name.startswith("data/")},
            "rows": [_shortened(match[1]) for line in log if (match := ROWS_OF_DATA.search(line))][:100],
            "spans": _within(_coarse_to_fine([_shortened(row) for row in spans]), SPAN_BYTES // share),
            "samples": [row for _, row in sorted(shown)],
            "samples_read": len(samples),
            "samples_every": samples_every,
            "verdicts": _within([_shortened(verdict) for verdict in reversed(verdicts)], VERDICT_BYTES // share),
            "alarms": alarms_of(series),
        }


def alarms_of(series: Mapping[str, List[tuple[int, float]]]) -> list[dict[str, Any]]:
    """The alarms that a run's metrics raise, and those that cannot be judged since a metric was not recorded.

    Args:
        series: (step, value) of each metric. Fewer than five values of a metric say nothing.

    Returns:
        The rules in the order of `ALARMS`, each with its texts, `state` (`raised`, `quiet` or `unknown`) and `seen`,
        which says from what to what its metrics went.
    """
    judged = []
    for alarm in ALARMS:
        ends = dict[str, tuple[float, float]]()
        for name in alarm.metrics:
            values, fifth = [value for _, value in series.get(name, ())], len(series.get(name, ())) // 5
            if fifth:
                ends[name] = fmean(values[:fifth]), fmean(values[-fifth:])
        known = len(ends) == len(alarm.metrics)
        state = "unknown" if not known else "raised" if alarm.raised(*ends.values()) else "quiet"
        seen = "; ".join(f"{name} went from {begin:.4g} to {end:.4g}" for name, (begin, end) in ends.items())
        texts = {"rule": alarm.rule, "meaning": alarm.meaning, "remedy": alarm.remedy}
        judged.append({"title": alarm.title, "metrics": alarm.metrics, "state": state, "seen": seen, **texts})
    return judged


def _rows(path: Path) -> tuple[list[Row], int]:
    """Rows of a JSONL file, and n where only every n-th step was read, since all of them are too many.

    Those of the last step, and rows with evaluations, are read too. A last line that is still being written is not; a
    missing file has no rows.

    Raises:
        ValueError: a line is no JSON object with its step, or not UTF-8.
    """
    packed = path.with_name(f"{path.name}.gz")  # to about a quarter
    size = sum(share * file.stat().st_size for file, share in ((path, 1), (packed, 4)) if file.is_file())
    every = math.ceil(size / READ[path.name]) or 1
    chosen, pending = list[tuple[int, bytes]](), list[tuple[int, bytes]]()
    evaluations, latest = 0, -1
    for number, line in enumerate(complete_lines(path), start=1):
        step = int(match[1]) if (match := STEP.match(line)) else number
        if step != latest:
            latest, pending = step, []
        wanted = step % every == 0
        if not wanted and b'"eval/' in line:
            evaluations += 1
            wanted = evaluations <= MOST_EVALUATIONS or evaluations % every == 0
        (chosen if wanted else pending).append((number, line))
    rows = list[Row]()
    for number, line in chosen + pending:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {path.name} is no JSON ({error})") from None
        if not (isinstance(rows[-1], dict) and isinstance(rows[-1].get("step", 0), int)):
            raise ValueError(f"line {number} of {path.name} is no object with a step")
    return rows, every


def _coarse_to_fine(items: List[Item]) -> list[Item]:
    """The items so that the first ones are spread over all of them: the last, the first, the middle, the quarters."""
    last = len(items) - 1
    return [items[i] for i in sorted(range(len(items)), key=lambda i: (i != last, -(i & -i) if i else -len(items)))]


def _within(items: Iterable[Item], most: int) -> list[Item]:
    """The items from the first on that have room in so many bytes of JSON; what is too large by itself is left out."""
    kept, used = list[Item](), 0
    for item in items:
        size = len(_json(item).encode())
        if used + size <= most:
            kept.append(item)
            used += size
    return kept


def _shortened(value: Any) -> Any:
    """A value for the page: long texts and lists are cut, numbers have five digits."""
    if isinstance(value, str):
        return value if len(value) <= TEXT else f"{value[:TEXT]} … ({len(value) - TEXT} more characters)"
    if isinstance(value, Mapping):
        return {str(name)[:200]: _shortened(inner) for name, inner in list(value.items())[:ITEMS]}
    if isinstance(value, list | tuple):
        return [_shortened(inner) for inner in value[:ITEMS]]
    return _rounded(value) if isinstance(value, float) else value


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _json(value: Any) -> str:
    """JSON that cannot end the element which it is in, nor begin another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    return UNSAFE.sub(lambda letter: f"\\u{ord(letter[0]):04x}", text)
