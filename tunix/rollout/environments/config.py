"""The recipe's section `rollout.environment`, and `data` with rewards and an environment for each data set of a
mixture. Loads without jax."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from tunix.config import Config, Place, Positive
from tunix.data.config import DataConfig, SourceConfig, form_of
from tunix.errors import UserError
from tunix.rollout.rewards.config import RewardConfig

PACKAGES = ("reasoning_gym", "textarena", "gymnasium", "trl", "verifiers", "openenv")
"""Names of the environments of other packages; `adapters.py` says what stands for them."""
TOOLS = "tools"
"""The name of the environment whose only part is to call tools."""
History = Literal["append", "template"]
"""What the model reads of its earlier turns; see `RolloutConfig.history`."""
AGENT = "agent"
"""The name of the environment that is a program, which asks the policy by itself."""


class MCPConfig(Config):
    """A server of tools over stdio, by the Model Context Protocol; needs the extra `mcp`."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, e.g. [python, server.py]."""
    env: dict[str, str] = {}
    """Environment variables that it gets in addition to PATH, HOME and the like."""
    session: Literal["worker", "episode"] = "worker"
    """Whether the episodes of a worker share a server, which then must remember nothing, or each has its own."""


class AgentConfig(Config):
    """A program that asks the policy as it asks OpenAI's servers; each run of it is an episode. Needs the extra
    `serve`."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, e.g. [python, agent.py, "{question}"]: `{column}` is that column of the row, and
    the path of a file is made absolute. It runs in a new folder, with OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL
    (policy) and TUNIX_ROW, the path of a file that has the row as JSON."""
    concurrency: Positive = 32
    """Programs that run at a time, at most, in each process of the run."""
    deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an episode may take; after that the program and all that it has started are killed, and the episode
    counts as failed."""
    reward: Literal["exit", "file"] | None = "exit"
    """Where the reward of an episode comes from: `exit`, 1 where the program exits with 0 and 0 where it exits with
    another code; `file`, the number in the file reward.json of its folder; null, from the section `reward` alone, whose
    functions may read the column `workdir`, the path of its folder. A program that is killed by a signal, or that asks
    for nothing, has failed."""

    def words(self) -> list[str]:
        """The command as it is run in another folder.

        Raises:
            UserError: there is no such program.
        """
        if shutil.which(self.command[0]) is None:
            raise UserError(
                f"rollout.environment.agent.command: {self.command[0]!r} is no program on the PATH and no file that "
                "can be executed: name one, as in [python, agent.py]"
            )
        # Not resolved: the interpreter of a virtual environment is a link.
        return [str(Path(word).absolute()) if Path(word).is_file() else word for word in self.command]


class EnvironmentConfig(Config):
    """The environment that answers the model; every completion is an episode of it. A name alone will do."""

    name: str = "problem"
    """A shipped environment (problem, calculator, guessing, tools), `module:Class` or `file.py:Class`, or one of
    another package: `reasoning_gym`, `textarena:GAME`, `gymnasium:NAME`, `trl:file.py:Class`, `verifiers:NAME`,
    `openenv:URL`, also written as `textarena: GAME`. Left out beside `tools` or `mcp`, it is tools; beside `agent`,
    agent."""
    tools: tuple[str, ...] = ()
    """Python functions that the model may call, each as `module:function` or `file.py:function`, with type hints and a
    docstring that has `Args:`, which the chat template shows as a JSON schema."""
    mcp: Annotated[tuple[MCPConfig, ...], BeforeValidator(lambda x: [x] if isinstance(x, Mapping) else x)] = ()
    """A server whose tools the model may call, or a list of them: {command: [python, server.py]}."""
    agent: AgentConfig | None = None
    """A program that plays the episodes: {command: [python, agent.py]}; nothing else of this section is read then."""
    options: dict[str, Any] = {}
    """Arguments of its constructor, such as {guesses: 5}."""
    turns: Positive = 16
    """Turns of the model in an episode at most; an environment that has not ended by then counts as failed."""
    deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a call of its constructor, reset or step may take; after that the episode counts as failed, and its
    worker is replaced. What a worker makes first may import and load, for 120 seconds at most."""
    workers: Positive | None = None
    """Worker processes for environments, each of which answers one call at a time; null: as many as there are cores, at
    most 8. More, up to 32, where a step waits for something else, such as a search. Never changes a result."""

    @model_validator(mode="before")
    @classmethod
    def _of_package(cls, value: Any) -> Any:
        """Reads `textarena: GAME` as the name `textarena:GAME`, and a name alone as one without options."""
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping):
            return value
        named = [key for key in PACKAGES if key in value]
        if not named:
            default = AGENT if value.get("agent") else TOOLS if value.get("tools") or value.get("mcp") else None
            return value if "name" in value or default is None else {**value, "name": default}
        if len(named) > 1 or "name" in value:
            raise ValueError(f"{', '.join(named)}: an environment has one name, and {' and '.join(value)} are given")
        rest = {key: item for key, item in value.items() if key != named[0]}
        return {**rest, "name": f"{named[0]}:{value[named[0]]}"}

    @model_validator(mode="after")
    def _of_tools(self) -> "EnvironmentConfig":
        called = bool(self.tools or self.mcp)
        if called and self.name != TOOLS and self.package != "trl":
            raise ValueError(
                f"tools and mcp: no part of the environment {self.name}, which answers the model by itself; leave the "
                "name out, or the tools"
            )
        if (self.name == AGENT) != (self.agent is not None):
            raise ValueError(
                "the environment agent has a program: agent: {command: [python, agent.py]}, without a name"
            )
        others = (key for key in type(self).model_fields if key not in ("name", "agent"))
        if self.agent and (idle := self.changed(others)):
            raise ValueError(f"{', '.join(idle)}: changes nothing for an agent, which has settings of its own")
        if self.name == TOOLS and not called:
            raise ValueError("the environment tools has none: name some in `tools: [file.py:function]` or in `mcp`")
        return self

    @property
    def package(self) -> str | None:
        """Which other package it is of, e.g. `textarena`; None for one that is shipped or the user's."""
        package = self.name.partition(":")[0]
        return package if package in PACKAGES else None


class RolloutSource(SourceConfig):
    """One of the data sets of `data.train`; what it leaves out is as the rest of the recipe says."""

    reward: RewardConfig | None = None
    """How completions of its prompts are scored, in place of the recipe's `reward`: by functions alone."""
    environment: EnvironmentConfig | None = None
    """The environment of its episodes, in place of `rollout.environment`."""

    @property
    def in_environment(self) -> bool:
        """Whether an environment of its own makes its prompts."""
        return self.environment is not None


class MixtureConfig(DataConfig):
    """Where the rows come from and how they become sequences."""

    train: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen, so that it may be narrower)
        Annotated[Place, Tag("path[]")] | Annotated[tuple[RolloutSource, ...], Tag("list[]")], Discriminator(form_of)
    ]

    @property
    def sources(self) -> tuple[RolloutSource, ...]:
        """The data sets of a mixture; empty where `train` is a single one."""
        return () if isinstance(self.train, str) else self.train
