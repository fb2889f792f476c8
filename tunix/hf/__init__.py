"""Everything on disk in Hugging Face's formats: model folders, PEFT folders, packed weights, matching vocabularies.

`source` finds out what a path holds; `model_folder` and `peft_folder` read and write it through `safetensors_io`.
"""
