"""Post-training of language models in JAX.

`tunix.Recipe.load("recipes/quickstart.yaml").run()` is the notebook's way in; `tunix --help` the command line's.
Nothing is imported before it is used, so that `import tunix` is instant.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from tunix.recipe import Recipe

        return Recipe
    raise AttributeError(f"module 'tunix' has no attribute {name!r}")
