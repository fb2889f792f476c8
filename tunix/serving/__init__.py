"""tunix's engine as a server of vLLM's completions protocol: `service.py` reads requests, answers many at a time and
loads the weights and adapters that it is told to, `app.py` has the addresses."""
