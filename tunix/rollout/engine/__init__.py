"""The sampling engine: requests fill slots, prefill computes prompts, each decode step samples a token in every slot.

A request goes request -> prefill -> programs (with sampling); `engine` keeps the slots, `shapes` the few shapes that
are compiled; `warmup` compiles them in advance.
"""
