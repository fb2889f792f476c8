"""Other programs' formats: MaxText's checkpoints, read and written, and compiled programs that run without tunix.

Both begin from, or end in, a model folder of `hf/`: `maxtext_tables` says what its tensors are called and how they
lie in MaxText, `maxtext` converts one after the other through `orbax_arrays`; `stablehlo` writes `programs`.
"""
