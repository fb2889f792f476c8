"""Tiny Qwen 3.5 models with a head that drafts, and the head as transformers' layers and torch compute it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jax.sharding import Mesh
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from tests.hf.test_model_folder import rewrite
from tests.models.test_qwen_vision import BEGIN, SOFT, TEXT, TOWER, given
from tests.models.test_qwen_vision import TOKENS as SOFT_TOKENS
from tests.tiny_models import CASES, Case, one_device, randomise, reference_folder
from tunix.hf.model_folder import load_params
from tunix.hf.source import read_folder
from tunix.models.families.table import read_config
from tunix.models.model import Model, Params
from tunix.types import Completion, Sequence

WIDTH, EPS = 32, 1e-3
FEW = 8
"""Ids of texts that see pictures."""
DENSE, MIXTURE = "qwen3_5-three-to-one", "qwen3_5_moe-five-of-two"


@dataclass
class Reference:
    """The backbone, and the head's tensors by their names in the folder."""

    text: Any
    """transformers' text model."""
    table: torch.Tensor
    """`[V D]` of its logits."""
    layer: Any
    tensors: dict[str, torch.Tensor]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm that multiplies by 1 + w."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + self.tensors[f"mtp.{name}.weight"])

    def read(self, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings `[T D]` of a sequence, and where rope turns its tokens to."""
        return self.text.embed_tokens(torch.from_numpy(tokens).long()), torch.arange(len(tokens))[None]

    @torch.no_grad()
    def states(self, tokens: np.ndarray) -> torch.Tensor:
        """`[T D]` of the backbone, after its final norm."""
        embedded, places = self.read(tokens)
        return self.text(inputs_embeds=embedded[None], position_ids=places, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def head(self, hidden: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
        """`[T-1 D]` for the states `[T-1 D]` before the last of the tokens `[T]`, as vLLM's `qwen3_5_mtp.py` says: each
        beside the next token's embedding, a picture's too, where rope turns the state's own token to."""
        embedded, places = self.read(np.asarray(tokens))
        both = [self.norm(embedded[1:], "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = (torch.cat(both, -1) @ self.tensors["mtp.fc.weight"].T)[None]
        later = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        rope = self.text.rotary_emb(x, places[..., :-1])
        return self.norm(self.layer(x, position_embeddings=rope, attention_mask=later), "norm")[0]

    def draft(self, states: torch.Tensor, tokens: np.ndarray, number: int) -> list[int]:
        """So many tokens that may follow `[T]`, of which the states `[T-1 D]` are those before the last."""
        hidden, drafted = states, list(tokens)
        for _ in range(number):
            made = self.head(hidden, np.array(drafted))[-1:]
            hidden, drafted = torch.cat([hidden, made]), [*drafted, int((made @ self.table.T).argmax())]
        return drafted[-number:]

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


def folder_with_head(folder: Path, name: str = DENSE, stacked: bool = False, **different: Any) -> Reference:
    """Saves a random model of a case of `CASES` with a head into a folder; a mixture's head has the matrices of each
    expert, as published, or those of all of them in one tensor."""
    case = CASES[name]
    backbone = reference_folder(Case(case.model_type, {**case.fields, **different}), folder)
    layer, tensors = head_of(backbone.config)
    kept = tensors if stacked else by_expert(tensors)
    rewrite(folder, lambda others: {**others, **kept})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"mtp_num_hidden_layers": 1}))
    return Reference(backbone.model, backbone.lm_head.weight, layer, kept)


def head_of(config: Any, attends: float = 1.0) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A random head: its layer, and its tensors by their names in a folder. Above 1 attention is so much sharper and
    weighs more, so that the places of tokens, and pictures, decide what it drafts."""
    number = config.layer_types.index("full_attention")
    layer = (Qwen3_5MoeDecoderLayer if "moe" in config.model_type else Qwen3_5DecoderLayer)(config, number)
    layer.eval()
    randomise(layer, seed=1)
    with torch.no_grad():
        layer.self_attn.q_norm.weight.add_(attends - 1.0)
        layer.self_attn.o_proj.weight.mul_(attends)
    generator = torch.Generator().manual_seed(2)
    tensors = {f"mtp.layers.0.{name}": x.detach().clone() for name, x in layer.state_dict().items()}
    tensors["mtp.fc.weight"] = torch.randn((WIDTH, 2 * WIDTH), generator=generator) * (2 * WIDTH) ** -0.5
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(WIDTH, generator=generator)
    return layer, tensors


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A head's tensors with those of all experts taken apart: `gate_up_proj [E 2F D]`, `down_proj [E D F]`."""
    apart = {name: x for name, x in tensors.items() if x.ndim < 3}
    for name in tensors.keys() - apart.keys():
        stem, _, last = name.rpartition(".")
        for expert, matrix in enumerate(tensors[name]):
            halves = matrix.chunk(2) if last == "gate_up_proj" else (matrix,)
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            apart |= {f"{stem}.{expert}.{part}.weight": x.clone() for part, x in zip(parts, halves, strict=True)}
    return apart


@dataclass
class SeeingReference(Reference):
    """A reference whose sequences all begin with one prompt that has pictures."""

    whole: Qwen3_5ForConditionalGeneration
    prompt: Sequence | None = None

    @torch.no_grad()
    def read(self, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """As for text, with what the tower makes of the prompt's pictures; what follows is text, whatever its ids."""
        assert self.prompt is not None
        assert self.prompt.pictures is not None
        came: list[torch.Tensor] = []
        hook = self.text.register_forward_pre_hook(
            lambda *call: came.append(call[2]["inputs_embeds"]), with_kwargs=True
        )
        self.whole.model.rope_deltas = None
        self.whole(**given(self.prompt, soft=FEW + SOFT - BEGIN), use_cache=False)
        hook.remove()
        further = len(tokens) - len(self.prompt.tokens)
        rope = self.prompt.pictures.followed(further).rope
        embedded, _ = super().read(tokens)
        return torch.cat([came[0][0], embedded[len(embedded) - further :]]), torch.from_numpy(rope).T[:, None]


def seeing_folder_with_head(folder: Path) -> SeeingReference:
    """Saves a random model that sees pictures, with a head, and few ids, into a folder."""
    torch.manual_seed(0)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: FEW + number for number, name in enumerate(names)}
    read: dict[str, Any] = {"text_config": {**TEXT, "vocab_size": FEW + 4}, "vision_config": TOWER, **ids}
    config = Qwen3_5Config(**read)
    whole = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomise(whole)
    whole.save_pretrained(folder)
    text = whole.model.language_model
    layer, tensors = head_of(text.config, attends=4.0)
    rewrite(folder, lambda others: {**others, **tensors})
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    return SeeingReference(text, whole.lm_head.weight, layer, tensors, whole)


def few(ids: np.ndarray) -> np.ndarray:
    """Ids of `test_qwen_vision` among FEW, and those of pictures behind them."""
    return np.where(ids >= BEGIN, ids - BEGIN + FEW, ids % FEW).astype(np.int32)


def load_seeing(folder: Path) -> tuple[Model, Params]:
    """Our model of such a folder."""
    config = read_folder(folder, pictures=True, mtp="freeze")
    assert config.vision is not None
    model = Model(replace(config, vision=replace(config.vision, tokens=SOFT_TOKENS)))
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), one_device())


def load_with_head(folder: Path, mesh: Mesh | None = None) -> tuple[Model, Params]:
    """Our model of such a folder."""
    model = Model(read_config(folder, mtp="freeze"))
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), mesh or one_device())
