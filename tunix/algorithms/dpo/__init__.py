"""DPO and its relatives: rewards of completions, comparisons of a pair's rewards, and the published forms by name."""
