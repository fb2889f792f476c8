"""Rows become sequences become packed batches: sources, tokenizer, chat rendering, packing, and Grain's order."""
