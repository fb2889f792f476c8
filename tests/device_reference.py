"""`python -m tests.device_reference`: stores what transformers computes for `benchmarks.device.parity`.

The models are those of the parity tests (a case of each family), with weights that numpy draws.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.device.parity import REFERENCE, digest, projected, sequences, weights
from tests.tiny_models import CASES, EACH, HEAVY, by_hf_name, gradients_by_hf_name, merged, saved_buffers
from tunix.models.families.table import FAMILIES, from_hf
from tunix.models.model import Model

STORED = (*EACH, *HEAVY)
"""The cases."""


def reference(model: Model, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model with these weights."""
    # torch's grouped products of bfloat16 want wider matrices than these.
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
    named = merged(by_hf_name(model, weights(model)), config.model_type)
    named = {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in named.items()}
    missing, unknown = made.load_state_dict(named, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}, missing
    made.tie_weights()
    return made.eval()


def logprobs(made: Any, vocab: int) -> torch.Tensor:
    """Of each sequence's tokens but the first, one sequence after the other."""
    found = []
    for sequence in sequences(vocab):
        ids = torch.from_numpy(sequence).long()
        logits = made(ids[None]).logits[0, :-1].float()
        found.append(torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0])
    return torch.cat(found)


def stacked(model: Model, made: Any) -> dict[str, np.ndarray]:
    """transformers' gradients under our names and in our layouts."""
    theirs = gradients_by_hf_name(made)
    theirs |= {key: np.zeros(weight.shape) for key, weight in saved_buffers(made).items()}
    found = {}
    for name, shape in model.shapes.items():
        tensor, layered = FAMILIES[model.config.family].tensors[name], name.startswith("layers/")
        one = shape[1:] if layered else shape
        layers = model.config.layers_with(tensor.mixer) if layered else (None,)
        every = [[theirs[key] for key in tensor.keys(layer, one)] for layer in layers]
        if tensor.by_expert:
            parts = [np.stack([tensor.read(x, one[1:]) for x in keys]) for keys in every]
        else:
            parts = [tensor.read(*keys, one) for keys in every]
        found[name] = np.stack(parts) if layered else parts[0]
    return found


def numbers(case: str) -> dict[str, Any]:
    """What is stored of one case."""
    config = CASES[case].hf_config()
    raw = config.to_dict()
    del raw["transformers_version"]
    model = Model(from_hf(raw, Path(case)))
    made = reference(model, config, torch.float32)
    found = logprobs(made, model.config.vocab_size)
    (-found.sum()).backward()
    with torch.no_grad():
        rounded = logprobs(reference(model, config, torch.bfloat16), model.config.vocab_size)
    return {
        "config": raw,
        "weights": digest(weights(model)),
        "logprobs": [round(x, 6) for x in found.tolist()],
        "rounded": [round(x, 6) for x in rounded.tolist()],
        "gradients": {
            name: [float(f"{x:.7g}") for x in both] for name, both in projected(stacked(model, made)).items()
        },
    }


def main() -> None:
    """Computes and writes."""
    stored = {case.split("-")[0]: numbers(case) for case in STORED}
    lines = (f" {json.dumps(family)}: {json.dumps(found)}" for family, found in stored.items())
    REFERENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
