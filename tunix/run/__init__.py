"""Runs a recipe: `build` creates the parts, `loop` trains and evaluates, `train` manages the run folder."""
