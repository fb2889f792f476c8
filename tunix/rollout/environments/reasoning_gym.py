"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym): a question, one turn, its own verifier.

    rollout:
      environment:
        name: reasoning_gym
        options: {tasks: {chain_sum: 1, spell_backward: 2}, config: {chain_sum: {max_digits: 2}}}

A row's `seed` and `index` name an item as `reasoning_gym.create_dataset(task, seed=seed)[index]` does; several tasks
are its composite, which draws one of them by weight for each index. A row's `level` sets the difficulty.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
from typing import Any, ClassVar

import numpy as np

from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import SIZE, row_number
from tunix.rollout.environments.base import Observation, Row, Step
from tunix.rollout.environments.problem import Problem, extracted


class ReasoningGym(Problem):
    """A question of one of the tasks, scored by the task's verifier: 1 for right, often less for partly right."""

    scores: ClassVar[bool] = True

    def __init__(
        self,
        *,
        tasks: str | list[str] | dict[str, int | float],
        config: dict[str, dict[str, Any]] | None = None,
        size: int = SIZE,
        levels: int | None = None,
        extract: str | None = None,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        """Sets what is asked.

        Args:
            tasks: name -> weight, names of equal weight, or one name.
            config: task -> arguments of the package's configuration of it, e.g. `{"chain_sum": {"max_terms": 3}}`.
            size: items of each task, and rows of a run.
            levels: how many levels of difficulty the rows have in turn, for `data.curriculum: {by: level}`; None for
                the settings of `config` alone.
            extract: where the answer is in the model's text; see `extracted`. None for all of it.
            template: text with the `{question}` in braces; None asks the question alone.
            chat: see `Problem`, as `system`.

        Raises:
            UserError: an unknown task or configuration, or a weight or a value that the package does not take.
        """
        super().__init__(template, chat, system)
        if not isinstance(tasks, dict):
            tasks = dict.fromkeys([tasks] if isinstance(tasks, str) else tasks, 1.0)
        self._tasks, self._config, self._size, self._extract = tasks, config or {}, size, extract
        if not tasks or not all(0 < weight < float("inf") for weight in tasks.values()):
            raise UserError(f"the environment reasoning_gym has tasks: {tasks}; each has a weight above 0")
        for task in self._config:
            if task not in tasks:
                raise UserError(
                    f"the environment reasoning_gym has a config of {task!r}, which is none of its tasks "
                    f"({', '.join(tasks)}).{nearest(task, tasks)}"
                )
        known = {name: kind for name, (_, kind) in _factory().DATASETS.items() if name != "composite"}
        for task in tasks:
            if task not in known:
                raise UserError(
                    f"the environment reasoning_gym has no task {task!r} among its {len(known)}.{nearest(task, known)}"
                )
            settings = [field.name for field in dataclasses.fields(known[task]) if field.name not in ("seed", "size")]
            for name in self._config.get(task, {}):
                if name not in settings:
                    raise UserError(
                        f"the environment reasoning_gym: {task} has no setting {name!r}; it has {', '.join(settings)}."
                        f"{nearest(name, settings)}"
                    )
        self._dataset(0, None)

    @staticmethod
    def levels(task: str) -> list[dict[str, Any]]:
        """The settings of a task at each level of the package's curriculum, the easiest first; a level's ranges hold
        those of the levels before it. A single empty one for a task without a curriculum."""
        factory = _factory()
        if not factory.has_curriculum(task):
            return [{}]
        curriculum, levels = factory.create_curriculum(task), []
        attributes = list(curriculum.attributes.values())
        names = [vars(x)[field] for x in attributes for field in _FIELDS if field in vars(x)]
        for level in range(max(len(attribute.levels) for attribute in attributes)):
            curriculum.set_global_level(level)  # an attribute with fewer levels stays at its last
            settings = curriculum.generate_configuration()
            with contextlib.suppress(AssertionError):  # of a level that the task itself refuses
                getattr(settings, "validate", list)()  # a few have none
                levels.append({name: getattr(settings, name) for name in names})
        return levels

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """The question of the row's `seed` and `index`, at its `level` where it has one.

        Raises:
            UserError: the row lacks one of them.
        """
        level = row_number(row, "level") if "level" in row else None
        self._data = self._dataset(row_number(row, "seed"), level)
        self._item = self._data[row_number(row, "index")]
        question = self._item["question"]
        return super().reset({**row, "prompt": question, "question": question}, rng)

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The verifier's score of the answer; 0 where there is none, or none that it can read."""
        answer = extracted(action, self._extract)
        if answer is None:
            return Step(reward=0.0, done=True)
        try:
            return Step(reward=float(self._data.score_answer(answer, self._item)), done=True)
        except Exception:  # of `int("four")`, or of a verifier that is broken, and then the right answer raises it, too
            self._data.score_answer(self._item["answer"], self._item)
            return Step(reward=0.0, done=True)

    def _dataset(self, seed: int, level: int | None) -> Any:
        """The items of a seed, at a level of each task's curriculum, at most its last; what the recipe writes wins."""
        specs = []
        for task, weight in self._tasks.items():
            settings = {}
            if level is not None:
                levels = self.levels(task)
                settings = levels[min(level, len(levels) - 1)]
            specs.append({"name": task, "weight": weight, "config": {**settings, **self._config.get(task, {})}})
        return _items(json.dumps(specs), seed, self._size)


_FIELDS = ("lower_field_name", "upper_field_name", "field_name")
"""Where an attribute of a curriculum has the names of the settings that it sets."""


def _factory() -> Any:
    """The package's tables of tasks and curricula."""
    return importlib.import_module("reasoning_gym").factory


@functools.lru_cache(maxsize=64)
def _items(specs: str, seed: int, size: int) -> Any:
    """The package's data set of some tasks, made once for all episodes of a worker."""
    factory, tasks = _factory(), json.loads(specs)
    spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
    try:
        if len(tasks) == 1:
            return factory.create_dataset(tasks[0]["name"], seed=seed, size=size, **tasks[0]["config"])
        return factory.create_dataset("composite", seed=seed, size=size, datasets=[spec(**x) for x in tasks])
    except (AssertionError, ValueError, TypeError, OSError) as error:
        names = ", ".join(f"{task['name']} {task['config']}" for task in tasks)
        raise UserError(f"the environment reasoning_gym cannot make {names}: {error!s}") from error
