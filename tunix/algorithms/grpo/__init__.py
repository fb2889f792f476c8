"""GRPO as one family: group-relative advantages, one clipped policy loss, famous cases as presets."""
