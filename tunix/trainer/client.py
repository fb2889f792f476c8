"""`tunix.client`: the client in one line, for a custom training loop without a recipe or a run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
from pydantic import ValidationError

from tunix.config import Config, CriticKind, MeshConfig, ModelConfig
from tunix.errors import UserError
from tunix.hf.source import Source, check_vocabulary, from_scratch, pretrained, settled
from tunix.lora.config import AdapterConfig
from tunix.models.families.table import FAMILIES
from tunix.protocols import Sampler
from tunix.trainer.build import ClientSettings, build_client
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.mesh_choice import Demand, memory_of, placed
from tunix.trainer.microbatches import Microbatcher, rows_per_microbatch
from tunix.trainer.trainer import Trainer
from tunix.util.startup import prepare_jax
from tunix.util.yaml_io import problems

Section = TypeVar("Section", bound=Config)


def client(
    model: str | Path | Mapping[str, Any] | ModelConfig,
    *,
    adapter: Mapping[str, Any] | AdapterConfig | None = None,
    optimizer: Mapping[str, Any] | OptimizerConfig | None = None,
    mesh: Mapping[str, Any] | MeshConfig | Literal["auto"] = "auto",
    length: int = 1024,
    batch_size: int = 32,
    steps: int | None = None,
    seed: int = 0,
    reference: bool = False,
    critic: CriticKind | None = None,
    slots: int | None = None,
    sampler: Sampler | None = None,
) -> Trainer:
    """An in-process client of one model: `step`, `sample`, `logprobs`, `save`, ... (`tunix.protocols.Client`).

    >>> client = tunix.client("runs/sft/export", adapter={"rank": 16}, optimizer={"learning_rate": 1e-4}, length=256)
    >>> client.publish()
    >>> groups = client.sample(prompts, n=8, sampling=tunix.Sampling(max_tokens=64), seed=0)

    Each section is written as in a recipe, as a mapping, or as an instance of its config class.

    Args:
        model: a hub id, a folder or a run; or a section such as `{"init": "random", "family": "qwen3"}`.
        adapter: the adapter to train on a frozen base, e.g. `{"rank": 16}`; None trains all weights.
        optimizer: None for AdamW at a rate of 1e-5, which is constant without `steps`.
        mesh: how the devices are used; `auto` chooses sizes that divide the model and `batch_size`.
        length: maximum tokens of a packed row, and of a prompt with its completion.
        batch_size: typical sequences of an update, for which micro-batches are sized; `step` accepts any number.
        steps: updates of the learning-rate schedule; None for a constant rate without a warm-up relative to them.
        seed: of random weights and of everything random during training.
        reference: whether a copy of the initial weights is kept as the reference; an adapter's base always is one.
        critic: `own` for a critic that is a separate model, `shared` for a value head on the policy.
        slots: completions that are sampled at a time; None for the default of this kind of device.
        sampler: completes prompts, e.g. an engine elsewhere; None for one on the same devices.

    Raises:
        UserError: the model cannot be loaded, or a section has an unknown key or an invalid value.
    """
    prepare_jax()
    config = _section(ModelConfig, model if not isinstance(model, str | Path) else {"path": str(model)}, "model")
    sizes = "auto" if mesh == "auto" else _section(MeshConfig, mesh, "mesh")
    wanted = None if adapter is None else _section(AdapterConfig, adapter, "adapter")
    settled_adapter, source = settled(wanted, _source(config))
    every = jax.devices()
    # A mesh that is given takes batches of any size.
    demand = Demand(source.decoder, rows=batch_size if sizes == "auto" else None)
    devices, _ = placed(sizes, demand, every, memory_of(every))
    rows = rows_per_microbatch(devices, batch_size, None, length, packing=True)
    if not isinstance(optimizer, OptimizerConfig):  # a schedule that nobody names is constant without a number of steps
        optimizer = {"schedule": "cosine" if steps else "constant", **(optimizer or {})}
    rule = _section(OptimizerConfig, optimizer, "optimizer")
    if steps is None and (rule.schedule != "constant" or 0 < rule.warmup < 1):
        raise UserError(f"optimizer: schedule {rule.schedule} and warmup {rule.warmup:g} follow from `steps`: give it")
    settings = ClientSettings(
        model=config,
        optimizer=rule,
        updates=steps or 1,
        microbatcher=Microbatcher(rows, devices),
        length=length,
        seed=seed,
        adapter=settled_adapter,
        reference=reference,
        critic=critic,
        slots=slots,
        decode=source.tokenizer and source.tokenizer.decode,
    )
    return build_client(settings, source, devices, sampler)


def _source(config: ModelConfig) -> Source:
    """The model's structure and the location of its weights."""
    if config.path is None:
        if config.tokenizer is not None:
            raise UserError(f"model.tokenizer: {config.tokenizer}: a client reads token ids alone; leave it out")
        return from_scratch(config)
    source = pretrained(config.path)
    check_vocabulary(source)
    return source


def _section(kind: type[Section], section: Mapping[str, Any] | Config, name: str) -> Section:
    """Validates a section as an instance of its config class.

    Raises:
        UserError: a key is unknown or a value is invalid.
    """
    if isinstance(section, kind):
        return section
    try:
        return kind.model_validate(section, context={"families": tuple(FAMILIES)})
    except ValidationError as error:
        lines = problems(error, {"": list(kind.model_fields)})
        raise UserError("\n".join(f"{name}.{line}" for line in lines)) from error
