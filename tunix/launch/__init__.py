"""Jobs for clusters: what a recipe and a topology ask of SLURM, of Kubernetes and of Pathways, as files.

`submit` makes the `job` (what it is, whatever the scheduler), has it written by `slurm` or by `kubernetes`, which knows
Pathways too, and submits it.
Nothing here needs a device or a network.
"""
