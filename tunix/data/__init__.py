"""From rows to packed batches: sources, tokenizer, chat rendering, cutting, packing, and Grain's order."""
