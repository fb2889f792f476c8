"""Other programs' formats: MaxText's checkpoints, read and written, and compiled programs that run without tunix.

Both begin from, or end in, a model folder of `hf/`: `maxtext` converts one array after the other through
`orbax_arrays`; `stablehlo` exports prefill and decode, which `standalone` runs.
"""
