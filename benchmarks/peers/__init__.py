"""Our speed against other libraries: same weights, ids and cores, in turns within one run. Rules: `README.md`."""
