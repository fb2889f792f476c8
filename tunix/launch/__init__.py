"""Jobs for clusters: what a recipe and a topology ask of SLURM, of Kubernetes and of Pathways, as files.

`placement` (how many hosts) and `storage` (what outlives a pod, what has to be sent along) -> `job` -> one of the
writers `slurm`, `kubernetes` and `pathways`. Nothing here needs a device or a network.
"""
