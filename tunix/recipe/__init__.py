"""From a YAML file to a checked recipe, without jax: stages apart, then the tiny form, then rules across sections."""
