"""Post-training of language models in JAX.

`tunix.train("recipes/quickstart.yaml")` is the notebook's way in; `tunix --help` the command line's. Nothing is
imported before it is used, so that `import tunix` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix.recipe.recipe import Recipe
    from tunix.run.train import train

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__", "train"]

_WHERE = {"Recipe": "tunix.recipe.recipe", "train": "tunix.run.train"}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'tunix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
