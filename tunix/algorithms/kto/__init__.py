"""KTO: training on completions that are labelled good or bad one by one."""
