"""Training and sampling through the Tinker protocol, as its unmodified SDK speaks it: `wire.py` has the messages,
`futures.py` the promises and their order, `compute.py` the compiled programs, `checkpoints.py` what is on disk,
`tenants.py` the models of all clients and the thread that computes, `routes.py` the addresses."""
