"""The train state, the compiled step, and the client that algorithms speak to."""
