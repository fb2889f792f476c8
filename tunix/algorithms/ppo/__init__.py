"""PPO: a clipped policy loss on generalised advantages, and a critic that learns the returns."""
