"""A recipe and a job of it, for the tests of the writers."""

from typing import Any

from tunix.launch.job import Job, Options
from tunix.launch.submit import job_of
from tunix.recipe.recipe import Recipe

KUBERNETES: dict[str, Any] = {"image": "images/tunix:1", "mounts": (("runs", "/runs"),)}
"""What every job on Kubernetes has to be told."""
EXTRAS: dict[str, dict[str, Any]] = {
    "slurm": {"topology": "h100:16"},
    "gke-gpu": {"topology": "h100:16", **KUBERNETES},
    "gke-tpu": {"topology": "v5e:4x4", **KUBERNETES},
    "pathways": {"topology": "v5e:4x4", "pathways_dir": "gs://bucket/pathways", **KUBERNETES},
}
"""Target -> options with which it has 16 devices."""


def recipe(**sections: Any) -> Recipe:
    """A small recipe of a model from scratch, on a volume."""
    model = {"init": "random", "family": "llama", "tokenizer": "bytes"}
    return Recipe.build({"model": model, "data": {"train": "org/rows"}, "output": "/runs/Small_1", **sections})


def job(target: str, of: Recipe | None = None, **options: Any) -> Job:
    """A job of 16 devices, unless the options say otherwise."""
    return job_of(of or recipe(), Options(target, **{**EXTRAS[target], **options}))
