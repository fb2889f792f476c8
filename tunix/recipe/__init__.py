"""Reads a YAML file as a checked recipe, without jax: resolves stages, shrinks it for `--tiny`, checks all sections."""
