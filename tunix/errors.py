"""The errors that a user meets: what was wrong, where, and what to do about it.

Everything that a user can cause (a recipe, a file, a mesh) raises `UserError`; the command line prints its text
without a traceback and exits with 2. Everything else is a bug in tunix and rises with its traceback.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_WORD, LONGEST_LINE = 240, 600
"""Characters of a message's word, and of its line, at most: a value may have thousands."""
PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
"""User and password in an address."""


class UserError(ValueError):
    """A user error: something that the user can fix. The message names the key or file, the value and the remedy.

    Of very long words and lines of the message the middle is left out: its beginning says where, its end what to do.
    So are passwords in addresses.
    """

    def __init__(self, message: str):
        super().__init__("\n".join(_shortened(PASSWORD.sub("...@", line)) for line in message.split("\n")))


class Doubtful(UserError):
    """An update whose result cannot be trusted: the weights after it must not be saved."""


class NonFinite(Doubtful):
    """A loss or a gradient norm that is not a finite number."""


class Interrupted(Exception):
    """A run that SIGINT or SIGTERM stopped after a checkpoint; the command line exits with 130."""


@dataclass(frozen=True)
class Failure:
    """A sample without a score, and why: it is counted as failed and left out, and is never a score of 0."""

    reason: str
    """The reason as a sentence, e.g. `judge took longer than 10 s`."""


Score = float | Failure | None
"""A reward of a sample; None where a function in TRL's style left the sample out."""


def _shortened(line: str) -> str:
    """The line without the middle of words above `LONGEST_WORD`, and without its own where it is still too long."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), line)
    return _without_middle(words, LONGEST_LINE)


def _without_middle(text: str, longest: int) -> str:
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def install_command(extra: str) -> str:
    """What installs an optional part, e.g. `pip install '.[serve]'` in a clone of tunix.

    A name instead of the folder would be looked up on the package index, where `tunix` is another project.

    Args:
        extra: an extra of pyproject.toml, e.g. `serve`; several are parted by commas.
    """
    return f"`pip install '.[{extra}]'` in a clone of tunix"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ` Did you mean 'steps'?`, or nothing when no known name is near.

    Args:
        name: what the user wrote, e.g. `step`.
        known: the names that exist, e.g. `["steps", "seed"]`.
    """
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
