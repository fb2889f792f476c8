"""A tiny Qwen 3.5 with a head that drafts, and the head as transformers' layers and torch compute it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from tests.hf.test_model_folder import rewrite
from tests.tiny_models import CASES, Case, one_device, randomise, reference_folder
from tunix.hf.model_folder import load_params
from tunix.models.families.table import read_config
from tunix.models.model import Model, Params
from tunix.types import Completion

WIDTH, EPS = 32, 1e-3


@dataclass
class Reference:
    """The backbone, and the head's tensors by their names in the folder."""

    backbone: Any
    layer: Any
    tensors: dict[str, torch.Tensor]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm that multiplies by 1 + w."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + self.tensors[f"mtp.{name}.weight"])

    @torch.no_grad()
    def states(self, tokens: np.ndarray) -> torch.Tensor:
        """`[T D]` of the backbone, after its final norm."""
        return self.backbone.model(input_ids=torch.from_numpy(tokens)[None].long()).last_hidden_state[0]

    @torch.no_grad()
    def head(self, hidden: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
        """`[T D]` for states `[T D]` and the token after each `[T]`, as vLLM's `qwen3_5_mtp.py` says."""
        embedded = self.backbone.model.embed_tokens(torch.from_numpy(np.asarray(tokens)).long())
        both = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = (torch.cat(both, -1) @ self.tensors["mtp.fc.weight"].T)[None]
        places = torch.arange(len(tokens))[None]
        later = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        x = self.layer(x, position_embeddings=self.backbone.model.rotary_emb(x, places), attention_mask=later)
        return self.norm(x, "norm")[0]

    def draft(self, states: torch.Tensor, tokens: np.ndarray, number: int) -> list[int]:
        """So many tokens that may follow `[T]`, of which the states `[T-1 D]` are those before the last."""
        hidden, after = states, list(tokens[1:])
        for _ in range(number):
            made = self.head(hidden, np.array(after))[-1:]
            hidden, after = torch.cat([hidden, made]), [*after, int((made @ self.backbone.lm_head.weight.T).argmax())]
        return after[-number:]

    def passes(self, prompt: np.ndarray, completion: Completion, number: int) -> int:
        """In how many passes a completion is sampled with so many draft tokens each."""
        whole, passes = np.concatenate([prompt, completion.tokens]), 0
        states = self.states(whole)
        for start, end in completion.turns:
            at, stop = len(prompt) + start, len(prompt) + end
            while at < stop:
                drafts = self.draft(states[:at], whole[: at + 1], number)
                real = whole[at + 1 : stop].tolist()
                right = [x == y for x, y in zip(drafts, real, strict=False)]
                at, passes = at + 1 + ([*right, False].index(False)), passes + 1
        return passes


def folder_with_head(folder: Path, **different: Any) -> Reference:
    """Saves a random model with a head into a folder."""
    case = CASES["qwen3_5-three-to-one"]
    backbone = reference_folder(Case(case.model_type, {**case.fields, **different}), folder)
    layer = Qwen3_5DecoderLayer(backbone.config, 3)
    layer.eval()
    randomise(layer, seed=1)
    generator = torch.Generator().manual_seed(2)
    tensors = {f"mtp.layers.0.{name}": x.detach().clone() for name, x in layer.state_dict().items()}
    tensors["mtp.fc.weight"] = torch.randn((WIDTH, 2 * WIDTH), generator=generator) * (2 * WIDTH) ** -0.5
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(WIDTH, generator=generator)
    rewrite(folder, lambda kept: {**kept, **tensors})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"mtp_num_hidden_layers": 1}))
    return Reference(backbone, layer, tensors)


def load_with_head(folder: Path) -> tuple[Model, Params]:
    """Our model of such a folder."""
    model = Model(read_config(folder, mtp="freeze"))
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), one_device())
