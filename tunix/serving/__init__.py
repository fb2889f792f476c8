"""tunix's engine as a server of vLLM's completions protocol: `body.py` reads a request, `batching.py` answers many at a
time, `service.py` loads the weights and adapters that it is told to, `app.py` has the addresses."""
