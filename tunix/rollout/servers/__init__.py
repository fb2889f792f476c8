"""A sampler whose completions come from vLLM servers: prompts go out as token ids, completions come back as token ids
with log-probs (`sampler` -> `server` -> `protocol`). Weights go out as folders (`handover`), and each server has to
show that it holds them (`probe`)."""
