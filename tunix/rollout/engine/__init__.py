"""The sampling engine: requests fill slots, prefill computes prompts, each decode step samples a token in every slot.

A request goes request -> pieces -> programs (with sampling); `batch` schedules, `page_tables` and `slots` are its
state, `shapes` the few shapes that are compiled, which `engine` does in advance.
"""
