"""Everything on disk in Hugging Face's formats: model folders, PEFT folders, packed weights, tokenizers' agreement.

`source` says what a path holds; `model_folder` and `peft_adapter` read and write it, by `safetensors_io`.
"""
