"""The window of a run's steps that `logging.profile` asks for, traced by JAX's profiler for `tunix trace` and XProf."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from tunix.trainer.config import PROFILE, ProfileConfig
from tunix.trainer.progress import Display


class Profiler:
    """Traces a window of steps into the run folder's `profile/`, a folder in it for each window or part of one."""

    def __init__(self, folder: Path, config: ProfileConfig, display: Display):
        """`folder`: the run folder."""
        self._folder, self._display = folder / PROFILE, display
        self._first, self._last = config.steps
        self._began: int | None = None
        """The first step of the trace that is being taken."""
        self._reached = 0

    @contextmanager
    def step(self, number: int, aside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Traces this step if the window has it: the trace begins and ends when the device has nothing left to do.

        A run that goes on in the middle of the window traces what is left of it.

        Args:
            number: of the step, from 1.
            aside: waits for the step last dispatched, and excludes what it encloses from the time of steps.
        """
        if not self._first <= number <= self._last:
            yield
            return
        if self._began is None:
            # Python's own calls are left out: they would be most of the trace, and slow down what is measured.
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with aside():
                jax.profiler.start_trace(self._folder, profiler_options=options)
            self._began = number
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        self._reached = number
        if number == self._last:
            with aside():
                self.close()

    def close(self) -> None:
        """Writes the trace that is being taken: the whole window, or what there is of it where the run ends earlier."""
        if self._began is not None:
            began, self._began = self._began, None
            jax.profiler.stop_trace()
            self._display.say(f"steps {began} to {self._reached} are profiled: `tunix trace {self._folder.parent}`")
