"""One file for each family: its tensors' names, its config.json, its presets; `table` lists them."""
