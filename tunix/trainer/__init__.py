"""The train state, the compiled step, and the trainer that algorithms speak to as a client."""
