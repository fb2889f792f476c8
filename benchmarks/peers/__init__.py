"""Our speed beside other libraries': same weights, ids and cores, in turns within one run. `README.md` has the rules."""
