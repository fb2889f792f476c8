"""Keeps compiled programs between processes."""

from pathlib import Path

import jax


def keep_compilations() -> None:
    """Keeps compiled programs in the user's cache folder, so that a second start is faster."""
    # The ignored rule: jax gives its config these names when it is imported, so pyright cannot know them.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/tunix/compiled").expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
