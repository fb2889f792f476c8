"""The train state, the compiled training step, and `Trainer`, the in-process implementation of the client."""
