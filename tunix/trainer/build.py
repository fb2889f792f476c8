"""Builds the in-process client from a model's source and a few settings: weights, optimizer, engine.

Both `tunix.client` and a run's `assemble` call it. A teacher, and a reference that is another model, are set on the
learner afterwards: `client.learner.teacher = ...`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from tunix.config import CacheType, CriticKind, DType, ModelConfig
from tunix.distributed.global_arrays import own_part
from tunix.errors import UserError
from tunix.hf.peft_folder import fingerprint
from tunix.hf.source import Source, adapted, adapter_weights, weights, with_stops
from tunix.lora.adapt import started, tables
from tunix.lora.config import AdapterConfig
from tunix.models.model import Model, Params
from tunix.models.param_names import is_own, trains
from tunix.models.quantization.fake_quant import check_unrounded
from tunix.models.quantization.rules import Rules
from tunix.protocols import Sampler
from tunix.rollout.config import RolloutMeshConfig
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Decode
from tunix.rollout.engine.shapes import NoRoom
from tunix.rollout.servers.handover import Handover, moves_alone
from tunix.rollout.servers.probe import Probe
from tunix.rollout.servers.protocol import Expected, Routing
from tunix.rollout.servers.sampler import ServerSampler
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.export import Exporter, StoredPolicy
from tunix.trainer.frozen_model import reference_of, snapshot
from tunix.trainer.learner import Learner
from tunix.trainer.mesh_choice import memory_of
from tunix.trainer.microbatches import Microbatcher, TrainerSpec
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.remat import chosen, held_by
from tunix.trainer.sampler_mesh import bring_of, check_slots, room_of, sampler_mesh, shares
from tunix.trainer.trainer import Trainer


@dataclass(frozen=True)
class ServerSettings:
    """The servers that sample in place of an engine in this process."""

    urls: tuple[str, ...]
    """Their addresses, e.g. `("http://host:8000",)`."""
    timeout: float
    """Seconds in which one has to answer a request, or load weights, e.g. 600.0."""
    folder: Path
    """Where weights are written for them, e.g. `runs/grpo/weights`."""
    temperature: float
    """The temperature of the completions that are trained on, e.g. 1.0."""
    tolerance: float
    """Largest difference of their log-probs to the trainer's, e.g. 0.05."""
    text: str = ""
    """A text whose ids are compared with theirs."""
    ids: tuple[int, ...] | None = None
    """The ids of the text, e.g. `(2, 651)`; None where there is no tokenizer."""


@dataclass(frozen=True)
class ClientSettings:
    """The settings of a client, apart from the source of its weights and its devices."""

    model: ModelConfig
    optimizer: OptimizerConfig
    updates: int
    """Updates of the whole run, for the learning-rate schedule, e.g. 1000."""
    microbatcher: Microbatcher
    length: int
    """T of packed rows, e.g. 2048."""
    seed: int = 0
    """Seed of random weights and of everything random during training, e.g. 0."""
    adapter: AdapterConfig | None = None
    """The adapter to train on a frozen base, already `settled` where it is loaded from a folder; None: all weights."""
    rules: Rules | None = None
    """Rounding that is simulated during training (QAT)."""
    reference: bool = False
    """Whether a frozen copy of the initial weights is kept as the reference. An adapter's base is available anyway."""
    critic: CriticKind | None = None
    """Where values of states come from; None where no values are needed."""
    critic_learning_rate: float | None = None
    """Learning rate of a critic that is a separate model; None for the policy's."""
    longest: int | None = None
    """Maximum tokens of a prompt and its completion; None for `length`."""
    slots: int | None = None
    """Completions that are sampled at a time; None for as many as there is room for."""
    sampler_memory: float = 0.85
    """Share of a device's memory for weights, the state of training and the sampler's keys and values."""
    cache_dtype: CacheType | None = None
    """What the sampler's keys and values are kept in; None for the model's dtype."""
    guesses: int = 0
    """Next tokens that the sampler guesses at each step; 0 for none."""
    sampler_mesh: RolloutMeshConfig | None = None
    """How the devices are divided to sample; None for the fewest to a copy of the weights that have room for it."""
    sampler_devices: Mesh | None = None
    """Devices that only sample; None where sampling and training share all."""
    sampler_ahead: bool = False
    """Whether newer weights arrive while it samples, so that both are there at once."""
    decode: Decode | None = None
    """Token ids -> text, in which stop strings are searched."""
    servers: ServerSettings | None = None
    """The servers that sample; None for an engine on the same devices."""


def build_client(settings: ClientSettings, source: Source, mesh: Mesh, sampler: Sampler | None = None) -> Trainer:
    """A client with the model's weights on the mesh, the optimizer, and a sampler.

    Args:
        sampler: None for servers where the settings name them, else an engine on the same devices.

    Raises:
        UserError: weights are missing or do not fit, or this device does not support the requested types.
    """
    check_unrounded(source.folder, source.rules, settings.rules)
    memory = memory_of(list(mesh.devices.flat))
    spec = spec_of(settings, source, mesh, memory)
    if sampler is None:
        local = settings.servers is None
        sampler = sampler_of(settings, spec, memory) if local else servers_of(settings, spec, source)
    params, frozen = _weights(settings, source, spec.model, mesh)
    return local_client(
        spec,
        params,
        frozen,
        keep_reference=settings.reference,
        sampler=sampler,
        exporter=_exporter(settings, source, spec.model),
        critic=_critic(settings, spec, params, frozen) if settings.critic == "own" else None,
    )


def stored_policy(
    settings: ClientSettings, source: Source, mesh: Mesh, *, adapter: bool = False, packed: bool = False
) -> StoredPolicy:
    """The policy of a run's checkpoints, to be exported.

    Weights that are written as they were trained are read in the dtype that they are written in, which is that of the
    computation: 2 bytes each for bfloat16.

    Args:
        adapter: whether the adapter is exported alone; then its base is not read.
        packed: whether rounded weights are packed.

    Raises:
        UserError: the source's weights are missing or do not fit.
    """
    spec = spec_of(settings, source, mesh, memory_of(list(mesh.devices.flat)))
    dtypes: dict[str, DType] = stored(settings, spec.model)[0]
    frozen: Params = {}
    if settings.adapter is None and not (spec.model.simulated or packed):
        written: DType = spec.model.dtype
        dtypes = dict.fromkeys(dtypes, written)
    if spec.model.config.vision or (settings.adapter is not None and not adapter):
        _, frozen = _weights(settings, source, spec.model, mesh)
    return StoredPolicy(_exporter(settings, source, spec.model), spec, dtypes, frozen)


def spec_of(settings: ClientSettings, source: Source, mesh: Mesh, memory: float | None) -> TrainerSpec:
    """The model, the optimizer and the rest of what stays fixed while the policy trains; no weights are read.

    Args:
        memory: bytes that a device gives to programs, by which `remat: auto` chooses; None where that is not known.

    Raises:
        UserError: this device does not support the requested types.
    """
    critic, config, updates = settings.critic, settings.optimizer, settings.updates
    model = adapted(with_stops(source), settings.model, settings.adapter, settings.rules)
    model = replace(model, has_scalar_head=critic in ("shared", "alone"), has_lm_head=critic != "alone")
    trained, _ = stored(settings, model)
    spec = TrainerSpec(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(config, updates, {name: model.axes[name] for name in trained}),
        schedule=build_schedule(config, updates),
        microbatcher=settings.microbatcher,
        length=settings.length,
        seed=settings.seed,
        adapter=settings.adapter,
    )
    if settings.model.remat != "auto":
        return spec
    params, frozen = (model.abstract(dtypes, mesh) for dtypes in stored(settings, model))
    remat, reason = chosen(spec, held_by(spec, params, frozen, copies=1 + settings.reference), memory)
    return replace(spec, model=replace(model, remat=remat), remat_reason=reason)


def critic_spec_of(settings: ClientSettings, policy: TrainerSpec) -> TrainerSpec:
    """The spec of a critic that is a separate model: the policy's structure with a scalar head in place of the other.

    Rounding is simulated only for the model that samples.
    """
    model = replace(policy.model, has_scalar_head=True, has_lm_head=False, simulated=())
    rate, config = settings.critic_learning_rate, settings.optimizer
    config = config.model_copy(update={"learning_rate": rate}) if rate else config
    trained, _ = stored(settings, model)
    optimizer = build_optimizer(config, settings.updates, {name: model.axes[name] for name in trained})
    return replace(policy, model=model, optimizer=optimizer, schedule=build_schedule(config, settings.updates))


def stored(settings: ClientSettings, model: Model) -> tuple[dict[str, DType], dict[str, DType]]:
    """Dtypes of the `(trainable, frozen)` parameters by name, but for those that are fixed (`Model.kinds`)."""
    config, adapter = settings.model, settings.adapter
    trained: DType = config.param_dtype or "float32"
    rest: DType = config.param_dtype or config.dtype
    if adapter is None:
        return {name: trained for name in model.shapes if trains(name, full=True)}, {
            name: rest for name in model.shapes if not trains(name, full=True)
        }
    of_adapter = {
        name for name in (*filter(is_own, model.shapes), *tables(adapter, model.config)) if name in model.shapes
    }
    base = [name for name in model.shapes if not is_own(name)]
    # In the order of the model's parameters.
    return {name: trained for name in model.shapes if name in of_adapter}, dict.fromkeys(base, rest)


def local_client(
    spec: TrainerSpec,
    params: Params,
    frozen: Params,
    *,
    keep_reference: bool = False,
    sampler: Sampler | None = None,
    exporter: Exporter | None = None,
    critic: Learner | None = None,
) -> Trainer:
    """The in-process client over weights that are already on the mesh.

    Args:
        params: the trainable weights; their buffers are taken over.
        frozen: the other weights: the base under an adapter, which is also its reference; empty without an adapter.
        keep_reference: whether a copy of the current weights is kept as the reference.
        sampler: completes prompts; None for an engine on the same devices.
        exporter: writes exported folders; None for one without tokenizer files.
        critic: a separate model that predicts the values of states.
    """
    reference = None
    if spec.adapter is not None:
        reference = reference_of(spec, frozen)
    elif keep_reference:
        reference = reference_of(spec, snapshot(spec.model, spec.mesh, params))
    learner = Learner(spec, params, frozen, reference)
    sampler = sampler or engine_of(spec, params)
    return Trainer(learner, sampler, exporter, critic)


def sampler_of(settings: ClientSettings, spec: TrainerSpec, memory: float | None) -> Engine:
    """The engine of a client, on the learner's devices or its own; no weights are read.

    Raises:
        UserError: its mesh or its slots do not divide, or there is no room for a request.
    """
    devices = settings.sampler_devices
    mesh, _ = sampler_mesh(spec.mesh if devices is None else devices, settings.sampler_mesh, spec.model, memory)
    trained, _ = stored(settings, spec.model)
    policies = [spec] if settings.critic != "own" else [spec, critic_spec_of(settings, spec)]
    weights = [
        [policy.model.abstract(dtypes, policy.mesh) for dtypes in stored(settings, policy.model)] for policy in policies
    ]
    held = [(policy, params, frozen) for policy, (params, frozen) in zip(policies, weights, strict=True)]
    # Devices of its own hold nothing else.
    held, references = (held, settings.reference) if devices is None else ([], False)
    newer = trained if settings.sampler_ahead else ()
    room = room_of(settings.sampler_memory, memory, mesh, spec.model, held, references=references, newer=newer)
    try:
        return engine_of(
            spec,
            trained,
            settings.slots,
            settings.longest,
            settings.decode,
            mesh,
            room,
            cache=settings.cache_dtype,
            guesses=settings.guesses,
        )
    except NoRoom as error:
        assert room is not None, "where the memory is not known there is room for everything"
        assert memory is not None
        raise UserError(f"{error}. {shares(settings.sampler_memory, memory, room, error.need)}") from error


def servers_of(settings: ClientSettings, spec: TrainerSpec, source: Source) -> ServerSampler:
    """The sampler of a client whose completions come from servers; nothing is asked of them yet."""
    servers, exporter = settings.servers, _exporter(settings, source, spec.model)
    assert servers is not None

    bare = replace(exporter, files=exporter.folder)  # an adapter alone, as often as it is published

    def write(path: Path, params: Mapping[str, jax.Array], adapter: bool) -> None:
        (bare if adapter else exporter)(path, spec, dict(params), {}, adapter=adapter)

    longest = settings.longest or spec.length
    config = spec.model.config
    routing = Routing(*config.routed, config.experts.number) if config.routed and config.experts else None
    expected = Expected(
        config.vocab_size, longest, servers.text, servers.ids, servers.temperature, servers.tolerance, routing
    )
    probe = Probe(spec.model, spec.mesh, spec.length, expected)
    handover = Handover(servers.folder, write, moves_alone(spec.adapter))
    return ServerSampler(servers.urls, servers.timeout, handover, probe, expected, settings.decode)


def engine_of(
    spec: TrainerSpec,
    params: Collection[str],
    slots: int | None = None,
    length: int | None = None,
    decode: Decode | None = None,
    mesh: Mesh | None = None,
    room: float | None = None,
    cache: CacheType | None = None,
    guesses: int = 0,
) -> Engine:
    """An engine on the learner's devices.

    Args:
        params: names of the trainable weights; with an adapter, only these are copied at each publication.
        slots: completions at a time; None for as many as there is room for.
        length: maximum tokens of a prompt and its completion; None for the length of a row.
        decode: token ids -> text, for stop strings.
        mesh: how the devices are divided to sample; None as they are for training.
        room: bytes for keys and values on each device; None for as many as slots can need.
        cache: what keys and values are kept in; None for the model's dtype.
        guesses: next tokens that are guessed at each step.

    Raises:
        UserError: the slots are not split evenly over the mesh, or there is no room for a request.
    """
    mesh = mesh or own_part(spec.mesh)
    if slots is not None:
        check_slots(slots, mesh)
    return Engine(
        spec.model,
        mesh,
        slots=slots,
        max_length=length or spec.length,
        cache_dtype=cache,
        decode=decode,
        moving=() if spec.adapter is None else tuple(params),
        room=room,
        speculate=guesses,
        bring=bring_of(spec.model, spec.mesh, mesh),
    )


def _weights(settings: ClientSettings, source: Source, model: Model, mesh: Mesh) -> tuple[Params, Params]:
    """`(trainable, frozen)` parameters; those of an adapter at their initial values."""
    config, adapter = settings.model, settings.adapter
    trained: DType = config.param_dtype or "float32"
    frozen: DType = config.param_dtype or config.dtype
    params, base = weights(source, model, mesh, settings.seed, trained, frozen, adapter is None)
    if adapter is None:
        return params, base
    if adapter.source is not None:
        return adapter_weights(adapter, model, params, trained, mesh), base
    return started(adapter, model, params, base, trained, mesh), base


def _critic(settings: ClientSettings, policy: TrainerSpec, params: Params, frozen: Params) -> Learner:
    """A separate critic model. It starts from the policy's weights and shares a frozen base with it."""
    spec = critic_spec_of(settings, policy)
    model, dtype = spec.model, settings.model.param_dtype or "float32"
    new: dict[str, DType] = {name: dtype for name in model.shapes if name not in policy.model.shapes}
    weights = {name: jax.numpy.copy(x) for name, x in params.items() if name in model.shapes}
    weights |= model.init(jax.random.key(settings.seed), new, policy.mesh)
    return Learner(spec, weights, {name: x for name, x in frozen.items() if name in model.shapes})


def _exporter(settings: ClientSettings, source: Source, model: Model) -> Exporter:
    """The exporter; an adapter records its base's fingerprint only where the base is an unchanged folder."""
    base = source.folder if settings.adapter is not None and source.stands_alone else None
    base_fingerprint = None if base is None else fingerprint(source.name, base, source.decoder, model.quantization)
    return Exporter(source.files, settings.rules, source.name, source.folder, base_fingerprint, source.stop_ids)
