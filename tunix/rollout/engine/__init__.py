"""The sampler: requests fill slots, prefill reads prompts, programs draw a token for all slots at a time.

A request goes request -> prefill -> programs (with sampling); `engine` keeps the slots, `shapes` the few shapes that
are compiled, `warmup` compiles them beforehand.
"""
