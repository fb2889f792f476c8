"""Rewards by name, as `tunix generate` and `tunix eval` are given them on the command line.

    exact_match                                      a shipped one, or file.py:function, or module:function
    "length target=40 width=20"                      with options
    "{name: number, columns: {answer: solution}}"    an entry of a recipe, where more is to be said

They are read like a recipe's, and run in the same worker processes under the same deadline.
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
from tunix.rollout.collect import ADDED, Collector, Player
from tunix.rollout.rewards.config import RewardConfig, RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.reward_model import judge as reward_judge
from tunix.types import Sampling
from tunix.util.yaml_io import parse_yaml, problems


def reward_config(specs: List[str], model: str | None, deadline: float) -> RewardConfig | None:
    """The `reward` section that the words of the command line stand for; None where there are none.

    Args:
        specs: one for each --reward, as above.
        model: hub id, folder or run of a reward model.
        deadline: seconds of a call.

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
def judged(
    speaker: InferenceModel,
    sampling: Sampling,
    config: RewardConfig | None,
    columns: List[str],
    data: DataConfig,
    play: Player | None = None,
) -> Iterator[Collector]:
    """What draws the speaker's completions and scores them.

    Args:
        sampling: how they are drawn.
        config: what they are worth.
        columns: of the rows, under our names.
        data: how long they may be, and how prompts are rendered, for a reward model.
        play: an environment.

    Raises:
        UserError: there is no such reward, its options mean nothing, or a column that it reads is not there.
    """
    with ExitStack() as stack:
        scorer = judge = None
        if config is not None:
            scorer = stack.enter_context(Scorer(config.functions, config.deadline, config.workers))
            scorer.check([*columns, *ADDED])
            judge = reward_judge(config, speaker.tokenizer, data, speaker.asked.dtype, build_mesh(MeshConfig()))
        yield Collector(speaker.tokenizer, sampling, scorer, play, data.max_length, judge)


def fingerprint(config: RewardConfig) -> dict[str, Any]:
    """What scores follow from besides the completions: settings, the user's own files, a reward model's weights."""
    places = [Path(function.name.rpartition(":")[0]) for function in config.functions]
    # A file that is not there is told of where it is loaded.
    texts = {str(place): place.read_text(encoding="utf-8") for place in places if place.suffix and place.is_file()}
    weights = None if config.model is None else digest_of_source(pretrained(config.model))
    return {**config.model_dump(mode="json", exclude={"workers"}), "files": texts, "weights": weights}


def digest_of_source(source: Source) -> str:
    """Of a model's files."""
    return digest_of_rows(digest_of_folder(folder) for folder in (source.folder, source.merged) if folder is not None)


def _entry(spec: str) -> Any:
    """One --reward as an entry of a recipe."""
    where = f"--reward {spec!r}"
    if spec.lstrip().startswith("{"):
        return parse_yaml(spec, where)
    try:
        name, *options = shlex.split(spec) or [""]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if not name:
        raise UserError(f"{where}: it names no reward; say for instance --reward exact_match")
    return {"name": name, "options": dict(_option(option, where) for option in options)}


def _option(text: str, where: str) -> tuple[str, Any]:
    """`target=40`; the value is read as in a recipe."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UserError(f"{where}: {text!r} is no option; write key=value, as in target=40")
    return key, parse_yaml(value, f"{where}, option {key}")
