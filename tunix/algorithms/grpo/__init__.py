"""GRPO and its relatives: group-relative advantages, one clipped policy loss, and published variants as presets."""
