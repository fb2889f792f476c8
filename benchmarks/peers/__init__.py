"""Our speed beside that of others: same weights, ids and cores, in turns within one run. `README.md` has the rules."""
