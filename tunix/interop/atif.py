"""Exports the completions that a run recorded as trajectories for other tools.

The Agent Trajectory Interchange Format: https://www.harborframework.com/docs/agents/trajectory-format.
"""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from tunix import __version__
from tunix.errors import UserError
from tunix.util.atomic_io import SAMPLES, atomic_folder, read_rows
from tunix.util.yaml_io import read_mapping

ATIF = "ATIF-v1.7"
"""Version of the format."""


def export_trajectories(run: Path, out: Path) -> int:
    """Writes each recorded completion as a trajectory, `STEP-GROUP-NUMBER.json` in a new folder; returns how many.

    Raises:
        UserError: the run has recorded none, or the folder exists.
    """
    samples = [row for row in read_rows(run / SAMPLES) if "prompt" in row and "completion" in row]
    if not samples:
        raise UserError(f"{run} has recorded no samples: logging.samples and eval.samples say how many are")
    model = read_mapping(run / "recipe.yaml").get("model", {})
    agent = {"name": "tunix", "version": __version__, "model_name": str(model.get("path") or model.get("family"))}
    counts = Counter[str]()
    with atomic_folder(out) as folder:
        for row in samples:
            group = "-".join(str(row[key]) for key in ("step", "task", "group") if key in row).replace("/", "_")
            name = f"{group}-{counts[group]}"
            counts[group] += 1
            begin = {"schema_version": ATIF, "session_id": run.resolve().name, "trajectory_id": name, "agent": agent}
            (folder / f"{name}.json").write_text(json.dumps({**begin, **_trajectory(row)}, indent=1))
    return len(samples)


def _trajectory(row: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of a sample. Where the values of its tokens tell them apart, the model's turns are steps of the agent,
    and what an environment wrote after one is the observation of that step; else its completion is one step."""
    prompt, completion = (x if isinstance(x := row[key], str) else json.dumps(x) for key in ("prompt", "completion"))
    steps: list[dict[str, Any]] = [{"source": "user", "message": prompt}]
    values = row.get("per_token", {})
    tokens = [str(token) for token in values.get("tokens", ())]
    turns = [(drawn, list(places)) for drawn, places in groupby(range(len(tokens)), lambda i: values["trained"][i])]
    for drawn, places in turns if len(turns) > 1 else ():
        text = "".join(tokens[i] for i in places)
        if drawn:
            measured = {name: [x[i] for i in places] for name, x in values.items() if name not in ("tokens", "trained")}
            metrics = {"completion_tokens": len(places), "logprobs": measured.pop("logprobs")}
            steps.append({"source": "agent", "message": text, "metrics": metrics, "extra": measured})
        elif steps[-1]["source"] == "agent":
            steps[-1]["observation"] = {"results": [{"content": text}]}
        else:  # before its first turn
            steps.append({"source": "user", "message": text})
    if len(steps) == 1:
        metrics = {"completion_tokens": row.get("tokens", len(tokens) or None)}
        metrics |= {"logprobs": values["logprobs"]} if values else {}
        steps.append({"source": "agent", "message": completion, "metrics": metrics})
    extra = {name: x for name, x in row.items() if name not in ("prompt", "completion", "per_token")}
    return {"steps": [{"step_id": i, **step} for i, step in enumerate(steps, 1)], "extra": extra}
