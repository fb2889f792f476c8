"""Parses the rewards that `tunix generate` and `tunix eval` accept on the command line, and runs them.

    exact_match                                      a built-in one, or file.py:function, or module:function
    "length target=40 width=20"                      with options
    "{name: number, columns: {answer: solution}}"    an entry of a recipe, for all other settings

They are read as in a recipe, and run in the same worker processes with the same deadline.
"""

import shlex
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunix.commands.resumable_output import digest_of_folder, digest_of_rows
from tunix.config import MeshConfig
from tunix.data.config import DataConfig
from tunix.errors import UserError
from tunix.hf.source import Source, pretrained
from tunix.inference.model import InferenceModel
from tunix.mesh import build_mesh
from tunix.rollout.collect import Collector
from tunix.rollout.environments.player import Player
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.config import RewardConfig, RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.reward_model import judge as reward_judge
from tunix.types import Sampling
from tunix.util.yaml_io import parse_yaml, problems


def reward_config(specs: List[str], model: str | None, deadline: float) -> RewardConfig | None:
    """The `reward` section for the options of the command line; None where there are none.

    Args:
        specs: the value of each --reward, as above.
        model: hub id, folder or run of a reward model.
        deadline: maximum seconds of a call.

    Raises:
        UserError: one of them cannot be read.
    """
    if not specs and model is None:
        return None
    keys = {f"functions.{i}": list(RewardFunction.model_fields) for i in range(len(specs))}
    section = {"functions": [_entry(spec) for spec in specs], "model": model, "deadline": deadline}
    try:
        return RewardConfig.model_validate(section)
    except ValidationError as error:
        raise UserError("\n".join(f"--reward: {line}" for line in problems(error, keys))) from error


@contextmanager
def open_collector(
    inference: InferenceModel,
    sampling: Sampling,
    config: RewardConfig | None,
    columns: List[str],
    data: DataConfig,
    play: Player | None = None,
) -> Iterator[Collector]:
    """Opens a collector, which samples and scores completions; its reward processes end with the context.

    Args:
        inference: the model that completes prompts.
        sampling: how completions are sampled.
        config: how they are scored; None without rewards.
        columns: of the rows, under the names in tunix.
        data: the limits of completions, and how prompts are rendered for a reward model.
        play: the environment, if there is one.

    Raises:
        UserError: there is no such reward, its options are invalid, or a column that it reads is missing.
    """
    with ExitStack() as stack:
        scorer = judge = None
        if config is not None:
            scorer = stack.enter_context(Scorer(config.functions, config.deadline, config.workers))
            scorer.check([*columns, *ADDED])
            judge = reward_judge(config, inference.tokenizer, data, inference.options.dtype, build_mesh(MeshConfig()))
        yield Collector(inference.tokenizer, sampling, scorer, play, data.max_length, judge)


def fingerprint(config: RewardConfig) -> dict[str, Any]:
    """Everything that scores depend on besides the completions: settings, custom files, a reward model's weights."""
    files = [Path(function.name.rpartition(":")[0]) for function in config.functions]
    # A missing file is reported where it is loaded.
    texts = {str(file): file.read_text(encoding="utf-8") for file in files if file.suffix and file.is_file()}
    weights = None if config.model is None else digest_of_source(pretrained(config.model))
    return {**config.model_dump(mode="json", exclude={"workers"}), "files": texts, "weights": weights}


def digest_of_source(source: Source) -> str:
    """The digest of a model's files, and of those of its adapter."""
    return digest_of_rows(digest_of_folder(folder) for folder in (source.folder, source.merged) if folder is not None)


def _entry(spec: str) -> Any:
    """Parses one --reward into an entry of a recipe."""
    where = f"--reward {spec!r}"
    if spec.lstrip().startswith("{"):
        return parse_yaml(spec, where)
    try:
        name, *options = shlex.split(spec) or [""]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if not name:
        raise UserError(f"{where}: it names no reward; say for instance --reward exact_match")
    values = {}
    for option in options:  # such as `target=40`, whose value is written as in a recipe
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise UserError(f"{where}: {option!r} is no option; write key=value, as in target=40")
        values[key] = parse_yaml(value, f"{where}, option {key}")
    return {"name": name, "options": values}
