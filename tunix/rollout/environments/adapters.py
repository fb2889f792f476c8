"""Environments of other packages, which a recipe names as `package` or `package:argument`.

Each is a row of `ADAPTERS` and a class that extends `Environment`, loaded where it is used, in the workers. An adapter
imports its package in its constructor or later, so that the class can be read without it. Loads without jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from tunix.data.config import EPISODES, DataConfig
from tunix.data.sources import Rows, open_held_out, open_rows
from tunix.errors import UserError, install_command, nearest
from tunix.rollout.environments.config import EnvironmentConfig, MixtureConfig


@dataclass(frozen=True)
class Adapter:
    """How environments of a package become ours."""

    source: str
    """`module:Class` of the adapter."""
    package: str | None = None
    """The package's name on the index; None where its class is the user's and nothing of the package is imported."""
    tried: str = ""
    """Its versions that were tried, e.g. `>=0.1.20,<0.2`."""
    extra: str = ""
    """The extra of pyproject.toml that installs it."""
    argument: str | None = None
    """The option that receives what follows the colon of a name; None where nothing does."""
    makes_rows: bool = True
    """Whether rows are episodes by number, so that a recipe needs no `data.train`; the option `size` says how many."""


def require_package(what: str, package: str, tried: str, extra: str) -> None:
    """Checks that a package is there in a version that was tried; see `Adapter`.

    Raises:
        UserError: it is missing, or of another version; begins with what needs it.
    """
    from packaging.specifiers import SpecifierSet

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UserError(f"{what} needs {package}: {install_command(extra)}") from None
    if not SpecifierSet(tried).contains(version, prereleases=True):
        raise UserError(
            f"{what} was tried with {package} {tried}, and {version} is installed: {install_command(extra)}"
        )


LM_EVAL = ">=0.4.13,<0.5"
"""The versions of lm-eval that `tunix.run.lm_eval` was tried with."""
_FOLDER = "tunix.rollout.environments"
ADAPTERS: Mapping[str, Adapter] = {
    "reasoning_gym": Adapter(
        f"{_FOLDER}.reasoning_gym:ReasoningGym", "reasoning-gym", ">=0.1.25,<0.2", extra="reasoning-gym"
    ),
    "textarena": Adapter(f"{_FOLDER}.textarena:TextArena", "textarena", ">=0.7.4,<0.8", "textarena", "game"),
    "gymnasium": Adapter(f"{_FOLDER}.gymnasium:Gymnasium", "gymnasium", ">=1.4,<1.5", "gymnasium", "game"),
    "trl": Adapter(f"{_FOLDER}.trl:TRL", argument="source", makes_rows=False),
    "verifiers": Adapter(f"{_FOLDER}.verifiers:Verifiers", "verifiers", ">=0.4,<0.5", "verifiers", "env"),
    "openenv": Adapter(f"{_FOLDER}.openenv:OpenEnv", "openenv", ">=0.10,<0.11", "openenv", "url"),
}
"""By the first word of a name."""


def row_number(row: Mapping[str, Any], name: str) -> int:
    """A whole number of a row, such as its `index`, from which an environment makes its episode; a `UserError` where
    the row has none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(
            f"the environment makes its episodes of rows {{'seed': 0, 'index': 0}}, and {name} is {value!r} in a row "
            f"with {', '.join(row) or 'nothing'}: leave data.train out, or give whole numbers from 0 on"
        )
    return value


def row_seed(row: Mapping[str, Any]) -> int:
    """The seed of a row's episode, 32 bits of its `seed` and `index`, e.g. 2968811710; see `row_number`."""
    return int(np.random.SeedSequence([row_number(row, "seed"), row_number(row, "index")]).generate_state(1)[0])


def adapter_of(config: EnvironmentConfig) -> tuple[Adapter, dict[str, Any]] | None:
    """The adapter of an environment and its options with the argument of its name; None where it is of no package.

    Raises:
        UserError: the package is missing or of a version that was not tried, or the name lacks its argument.
    """
    name, _, argument = config.name.partition(":")
    adapter = ADAPTERS.get(name)
    if adapter is None:
        return None
    if bool(argument) != (adapter.argument is not None):
        written = f"{name}:{adapter.argument.upper()}" if adapter.argument else name
        raise UserError(f"rollout.environment.name is {config.name!r}; written is {written}")
    if adapter.package is not None:
        require_package(f"the environment {config.name}", adapter.package, adapter.tried, adapter.extra)
    if adapter.argument is None:
        return adapter, config.options
    if adapter.argument in config.options:
        raise UserError(f"the environment {config.name} has {adapter.argument} in its name and among its options")
    return adapter, {adapter.argument: argument, **config.options}


_HELD_OUT = 2**31
"""Added to the seed of held-out episodes, which are others than those that are trained on."""
SIZE = 10_000
"""Rows of an environment that makes its own, where its option `size` says nothing."""


def training_rows(data: DataConfig, environment: EnvironmentConfig | None, seed: int) -> Rows:
    """The rows that a recipe trains on: a data set, or the episodes of an environment that makes its own; or those of
    several data sets, one after the other.

    Raises:
        UserError: something of it is not there; see `open_rows`.
    """
    if not isinstance(data, MixtureConfig) or not data.sources:
        assert isinstance(data.train, str)
        if data.train == EPISODES:
            return _own_rows(environment, seed, "data.train")
        return open_rows(data.train, data.split, data.columns.values())
    return Rows.joined(
        [
            _own_rows(source.environment or environment, seed, f"data.train.{number}")
            if source.path == EPISODES
            else open_rows(source.path, source.split, data.of(source).columns.values())
            for number, source in enumerate(data.sources)
        ],
        data.sources,
    )


def evaluation_rows(data: DataConfig, environment: EnvironmentConfig | None, seed: int) -> Rows | None:
    """The rows that a recipe holds out, episodes of another seed among them; None where it holds out none.

    Raises:
        UserError: see `open_held_out`.
    """
    seed += _HELD_OUT
    if data.held_out:
        sources = data.sources if isinstance(data, MixtureConfig) else ()
        played = {source.name: source.environment for source in sources if source.environment is not None}
        parts = [
            _own_rows(played.get(rows.name, environment), seed, "data.eval")
            if rows.path == EPISODES
            else open_held_out(rows.path, rows.split or data.eval_split, data.of(rows).columns.values())
            for rows in data.held_out
        ]
        return Rows.joined(parts, data.held_out)
    if data.eval == EPISODES:
        return _own_rows(environment, seed, "data.eval")
    if isinstance(data.eval, str):
        return open_held_out(data.eval, data.eval_split, data.columns.values())
    if data.eval_split is None:
        return None
    assert isinstance(data.train, str), "a mixture has no split that is held out"
    return open_rows(data.train, data.eval_split, data.columns.values())


def _own_rows(config: EnvironmentConfig | None, seed: int, key: str) -> Rows:
    if config is None:
        raise UserError(f"{key} is {EPISODES!r}, the rows that an environment makes, and there is none: name others")
    known = adapter_of(config)
    if known is None or not known[0].makes_rows:
        hint = nearest(config.name.partition(":")[0], ADAPTERS) if known is None else ""
        raise UserError(f"the environment {config.name} makes no rows of its own: name some, {key}{hint and '.'}{hint}")
    size, levels = config.options.get("size", SIZE), config.options.get("levels")
    for name, number in (("size", size), ("levels", levels)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UserError(f"the environment {config.name} has {name} {number!r}: it is a whole number, from 1 on")
    rows = [{"seed": seed, "index": i} | ({"level": i % levels} if levels else {}) for i in range(size)]
    return Rows(config.name, rows)
