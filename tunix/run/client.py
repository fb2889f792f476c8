"""Weights on the devices of a `Setup`: the client of a run, and `tunix.client`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from pydantic import ValidationError

from tunix.algorithms.sft.algorithm import SFT
from tunix.config import CriticKind, DType, MeshConfig, ModelConfig
from tunix.errors import UserError
from tunix.hf.source import (
    Source,
    adapter_weights,
    check_vocabulary,
    from_scratch,
    pretrained,
    settled,
    weights,
)
from tunix.lora.adapt import started
from tunix.lora.config import AdapterConfig
from tunix.models.families.table import FAMILIES
from tunix.models.model import Params
from tunix.models.quantization.formats import check_unrounded
from tunix.protocols import Sampler
from tunix.recipe.recipe import known_keys
from tunix.recipe.sections import Sections
from tunix.run.frozen_models import build_teachers
from tunix.run.sampler import local_engine, servers_of
from tunix.run.setup import Setup
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.frozen_model import reference_of
from tunix.trainer.learner import Learner
from tunix.trainer.mesh_choice import Demand, memory_of, placed
from tunix.trainer.trainer import Trainer
from tunix.util.startup import prepare_jax
from tunix.util.yaml_io import problems


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
    if not isinstance(optimizer, OptimizerConfig):  # a schedule that nobody names is constant without a number of steps
        optimizer = {"schedule": "cosine" if steps else "constant", **(optimizer or {})}
    written = {
        "model": {"path": str(model)} if isinstance(model, str | Path) else model,
        "adapter": adapter,
        "optimizer": optimizer,
        "mesh": mesh,
        "data": {"train": "the caller's rows", "max_length": length},
        "rollout": {"slots": slots},
        "batch_size": batch_size,
        "steps": steps or 1,
        "seed": seed,
        "output": ".",
    }
    try:
        recipe = Sections.model_validate(written, context={"families": tuple(FAMILIES)})
    except ValidationError as error:
        raise UserError("\n".join(problems(error, known_keys(None)))) from error
    rule, config = recipe.optimizer, recipe.model
    if rule.on_nonfinite == "rollback":
        raise UserError("optimizer.on_nonfinite: rollback is for runs, and a loop of yours loads its own checkpoints")
    if steps is None and (rule.schedule != "constant" or 0 < rule.warmup < 1):
        raise UserError(f"optimizer: schedule {rule.schedule} and warmup {rule.warmup:g} follow from `steps`: give it")
    if config.path is not None:
        source = pretrained(config.path)
        check_vocabulary(source)
    elif config.tokenizer is not None:
        raise UserError(f"model.tokenizer: {config.tokenizer}: a client reads token ids alone; leave it out")
    else:
        source = from_scratch(config)
    settled_adapter, source = settled(recipe.adapter, source)
    recipe = recipe.model_copy(update={"adapter": settled_adapter})
    devices = jax.devices()
    memory = memory_of(devices)
    # A mesh that is given takes batches of any size.
    demand = Demand(source.decoder, rows=batch_size if recipe.mesh == "auto" else None)
    chosen, _ = placed(recipe.mesh, demand, devices, memory)
    plain, updates = SFT(recipe.algorithm), steps or 1
    setup = Setup(recipe, source, plain, chosen, memory, updates=updates, keeps_reference=reference, critic=critic)
    return client_of(setup, sampler)


def client_of(setup: Setup, sampler: Sampler | None = None, teachers: Sequence[Source | None] = ()) -> Trainer:
    """The client of a run: weights on the mesh, an optimizer, a sampler, and the models that do not train beside it.

    Without a `sampler` it has the servers that the recipe names, or else an engine in this process.

    Raises:
        UserError: weights are missing or do not fit, this device does not support the requested types, or the sampler's
            mesh or slots do not divide or have no room.
    """
    source, spec, family = setup.source, setup.spec, setup.source.decoder.family
    if setup.algorithm.needs.values == "alone" and FAMILIES[family].classifier is None:
        raise UserError(
            f"model.path: transformers has no sequence classifier for {family}, so that nothing could load a reward "
            "model of it: train one of another family"
        )
    check_unrounded(source.folder, source.rules, setup.recipe.quantization)
    if sampler is None:
        sampler = servers_of(setup) if setup.recipe.rollout.engine == "vllm" else local_engine(setup)
    params, frozen = initial_weights(setup)
    critic = None
    if (critic_spec := setup.critic_spec) is not None:
        # A critic that is a separate model has the policy's initial weights, and its frozen base.
        shapes = critic_spec.model.shapes
        new: dict[str, DType] = {name: setup.trained_dtype for name in shapes if name not in spec.model.shapes}
        copies = {name: jax.numpy.copy(x) for name, x in params.items() if name in shapes}
        copies |= critic_spec.model.init(jax.random.key(setup.recipe.seed), new, setup.mesh)
        critic = Learner(critic_spec, copies, {name: x for name, x in frozen.items() if name in shapes})
    learner = Learner(spec, params, frozen, reference_of(spec, params, frozen, kept=setup.keeps_reference))
    if setup.recipe.teacher is not None:
        learner.teacher = build_teachers(setup.recipe, teachers, source, learner)
    return Trainer(learner, sampler, setup.exporter, critic)


def initial_weights(setup: Setup) -> tuple[Params, Params]:
    """`(trainable, frozen)` parameters; those of an adapter at their initial values.

    Raises:
        UserError: the source's weights are missing or do not fit.
    """
    adapter, model, mesh, seed = setup.recipe.adapter, setup.spec.model, setup.mesh, setup.recipe.seed
    trained = setup.trained_dtype
    params, base = weights(setup.source, model, mesh, seed, trained, setup.frozen_dtype, adapter is None)
    if adapter is None:
        return params, base
    if adapter.source is not None:
        return adapter_weights(adapter, model, params, mesh), base
    return started(adapter, model, params, base, trained, mesh), base
