"""Writes `docs/recipe.md`, the reference of every key of a recipe, from the models that check recipes.

    python docs/make_reference.py

Types and defaults are read from the pydantic models; meanings are the strings below the fields in their source. A test
runs `text()` and compares, so the page cannot fall behind.
"""

import ast
import inspect
import json
import types
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from tunix.algorithms.distill.config import DistillConfig, NamedTeacher, TeacherConfig, TeacherMesh
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import Config, Family, MeshConfig, ModelConfig, ProductsConfig
from tunix.data.config import CurriculumConfig, RowsConfig
from tunix.lora.config import AdapterConfig
from tunix.models.families.table import FAMILIES, SIZE_NAMES
from tunix.models.families.table import presets as published
from tunix.models.quantization.rules import QuantizationConfig, Rule
from tunix.recipe.recipe import Recipe
from tunix.rollout.config import EvalConfig, EvalTask, ReplayConfig, RolloutConfig, RolloutMeshConfig
from tunix.rollout.environments.config import AgentConfig, EnvironmentConfig, MCPConfig, MixtureConfig, RolloutSource
from tunix.rollout.rewards.config import JudgeConfig, RewardConfig, RewardFunction
from tunix.trainer.config import CheckpointConfig, LoggingConfig, OptimizerConfig, ProfileConfig, SamplesConfig

PAGE = Path(__file__).with_name("recipe.md")
SECTIONS: dict[str, type[Config]] = {
    "model": ModelConfig,
    "model quantization": ProductsConfig,
    "adapter": AdapterConfig,
    "quantization": QuantizationConfig,
    "quantization rules": Rule,
    "data": MixtureConfig,
    "data train": RolloutSource,
    "data eval": RowsConfig,
    "data curriculum": CurriculumConfig,
    "algorithm (sft)": SFTConfig,
    "algorithm (grpo)": GRPOConfig,
    "algorithm (ppo)": PPOConfig,
    "algorithm (dpo)": DPOConfig,
    "algorithm (kto)": KTOConfig,
    "algorithm (reward)": RewardModelConfig,
    "algorithm (distill)": DistillConfig,
    "teacher": TeacherConfig,
    "teacher by_name": NamedTeacher,
    "teacher mesh": TeacherMesh,
    "reward": RewardConfig,
    "reward functions": RewardFunction,
    "reward judge": JudgeConfig,
    "rollout": RolloutConfig,
    "rollout mesh": RolloutMeshConfig,
    "rollout replay": ReplayConfig,
    "rollout environment": EnvironmentConfig,
    "rollout environment mcp": MCPConfig,
    "rollout environment agent": AgentConfig,
    "optimizer": OptimizerConfig,
    "mesh": MeshConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "logging samples": SamplesConfig,
    "logging profile": ProfileConfig,
    "eval": EvalConfig,
    "eval tasks": EvalTask,
}

OPENING = """\
# Every key of a recipe

Written by `python docs/make_reference.py` from the models that check recipes; a test keeps it up to date.

A recipe is YAML. `tunix check RECIPE.yaml --all` prints it with every default filled in. Any key can be replaced on the
command line: `tunix run RECIPE.yaml optimizer.learning_rate=1e-5 data.max_length=512`; `key=null` clears one. A key
that is not here is refused, with the nearest one named.
"""


def text() -> str:
    """The whole page."""
    parts = [OPENING, f"## Top level\n\n{top_level()}"]
    for name, model in SECTIONS.items():
        parts.append(f"## `{name}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n{table(model)}")
    named = ", ".join(f"`{name}`" for name in SIZE_NAMES)
    parts += [ROWS, STAGES, f"## Presets\n\n{SIZES}{named}.\n\n{presets()}"]
    return "\n".join(parts)


def presets() -> str:
    """The published sizes that `model.preset` may name."""
    lines = [
        "| preset | family | vocab_size | d_model | num_layers | num_heads | num_kv_heads | head_dim | ffn |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, c in published().items():
        sizes = (c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn)
        lines.append(f"| `{name}` | {c.family} | {' | '.join(f'{size:,}' for size in sizes)} |")
    return "\n".join(lines) + "\n"


SIZES = """\
With `init: random`, `model.preset` is one of these published sizes. `model.sizes` replaces numbers of it, or of the
family's own small shape where no preset is given: """

ROWS = """\
## Rows

What a row of `data.train` holds. `data.columns` maps other names to these.

| columns | what is trained |
|---|---|
| `messages`: a list of {role, content}, rendered by the chat template | the assistant's turns with their stop tokens |
| `prompt`, `completion`: two strings | the completion and the end token |
| `prompt`, `completion`: two lists of messages | the assistant's turns of the completion |
| `text` | all of it, and the end token |
| `input_ids`, with `labels` (the ids again, -100 where not trained) or `loss_mask` | as they say; nothing is added |
| `input_ids`, with `completion_mask`, `assistant_masks` or both | the tokens that have 1 in each |
| `input_ids`, with `attention_mask` beside any of these | as before, without the padding at the ends |
| `input_ids` with `loss_weights`, by every row or none | each token counts so much, in the loss and its denominators |

Four columns may stand beside them: `weight`, a number that scales the row's share of the loss, `tools` and
`chat_template_kwargs`, which the chat template reads, and `images`, with `data.pictures`. `tunix inspect RECIPE.yaml`
shows rows as the model will see them, and which were refused or shortened.
"""

STAGES = """\
## Stages

`stages` is a list of such mappings. Each takes the sections above the list as its defaults, key by key, and starts
from the weights of the stage before. They share one run folder, with a sub-folder for each, and a run that was cut
short goes on in the right one.

```yaml
model: {path: Qwen/Qwen3-0.6B}
optimizer: {learning_rate: 1.0e-5}
stages:
  - {data: {train: general.jsonl}, epochs: 1}
  - {data: {train: special.jsonl}, epochs: 3, optimizer: {learning_rate: 2.0e-6}}
output: runs/two_stages
```
"""


def table(model: type[Config]) -> str:
    """Key, type, default and meaning of every field of one section."""
    meanings = docstrings(model)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind, meaning = in_words(field.annotation, field.metadata), meanings[name]
        lines.append(f"| `{field.alias or name}` | {kind} | {default_of(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def top_level() -> str:
    """The same for the recipe itself, with links to the sections' own tables."""
    links: dict[str, list[str]] = {}
    for title in SECTIONS:
        links.setdefault(title.split()[0], []).append(f"[{title}](#{anchor(title)})")
    meanings = docstrings(Recipe, known=links)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in Recipe.model_fields.items():
        if name in links:
            kind, default, meaning = "section", default_of(field), f"See {', '.join(links[name])}."
        elif name == "stages":
            kind, default, meaning = "list of mappings", "none", "See [Stages](#stages)."
        else:
            kind, default, meaning = in_words(field.annotation, field.metadata), default_of(field), meanings[name]
        lines.append(f"| `{name}` | {kind} | {'`runs/<file>`' if name == 'output' else default} | {meaning} |")
    return "\n".join(lines) + "\n"


def anchor(title: str) -> str:
    """A heading as the renderers link to it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def docstrings(model: type[Config], known: Container[str] = ()) -> dict[str, str]:
    """Field -> the string below it, of the class and of those it inherits from.

    Args:
        known: fields that need none.

    Raises:
        ValueError: another field has none.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Config) and base is not Config:
            (body,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(body, ast.ClassDef)
            found |= dict(strings(body))
    if missing := [name for name in model.model_fields if name not in found and name not in known]:
        raise ValueError(f"{model.__name__}: write the meaning below {', '.join(missing)}")
    return found


def strings(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Each annotated name that a string follows."""
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split()).replace("|", "\\|")


def default_of(field: FieldInfo) -> str:
    """The default as YAML spells it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Config):
        return "as below"
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def in_words(kind: Any, metadata: list[Any]) -> str:
    """An annotation with its bounds, in words: `number > 0 or null`."""
    if kind == Family:
        return ", ".join(f"`{name}`" for name in FAMILIES)
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return in_words(kind, [*metadata, *(bound for item in more for bound in getattr(item, "metadata", [item]))])
    if get_origin(kind) is Literal:
        words = (str(word).lower() if isinstance(word, bool) else word for word in get_args(kind))
        return ", ".join(f"`{word}`" for word in words)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else in_words(part, metadata) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = dict.fromkeys(in_words(part, []) for part in get_args(kind) if part is not Ellipsis)
        return f"list of {' and '.join(parts)}"
    if get_origin(kind) is dict:
        return f"mapping to {in_words(get_args(kind)[1], [])}"
    if kind in SECTIONS.values():
        title = next(title for title, model in SECTIONS.items() if model is kind)
        return f"[{title}](#{anchor(title)})"
    return f"{NOUNS[kind]} {', '.join(bound for item in metadata for bound in bounds(item))}".strip()


def bounds(item: Any) -> Iterator[str]:
    """A constraint of pydantic's as symbols."""
    for kind, name, symbol in ((Gt, "gt", ">"), (Ge, "ge", "≥"), (Lt, "lt", "<"), (Le, "le", "≤")):
        if isinstance(item, kind):
            value = getattr(item, name)
            yield f"{symbol} {'2³²' if value == 2**32 else value}"


NOUNS = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}

if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
