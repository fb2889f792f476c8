"""A recipe becomes a run: `build` makes the parts, `loop` turns, `train` keeps the folder."""
