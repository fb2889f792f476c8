"""Jobs for clusters: what a recipe and a topology ask of SLURM, of Kubernetes and of Pathways, as files.

`job` (what it is, whatever the scheduler) -> one of the writers `slurm` and `kubernetes`, which knows Pathways too.
Nothing here needs a device or a network.
"""
