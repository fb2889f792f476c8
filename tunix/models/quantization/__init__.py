"""Weights and activations in few bits: which matrices (`modules`), by which `rules`, in which `formats`."""
