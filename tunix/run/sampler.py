"""Who completes a run's prompts: an engine in this process, or servers. No weights are read, and nothing is asked."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax

from tunix.errors import UserError
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.shapes import NoRoom
from tunix.rollout.servers.handover import Handover, moves_alone
from tunix.rollout.servers.probe import TEXT, Probe
from tunix.rollout.servers.protocol import Expected, Routing
from tunix.rollout.servers.sampler import ServerSampler
from tunix.run.setup import Setup
from tunix.trainer.sampler_mesh import bring_of, room_of, sampler_mesh, shares


def local_engine(setup: Setup) -> Engine:
    """The engine of a run, on the devices that train or on its own.

    Raises:
        UserError: its mesh or its slots do not divide, or there is no room for a request.
    """
    rollout, spec, memory = setup.recipe.rollout, setup.spec, setup.memory
    mesh, _ = sampler_mesh(setup.sampling_mesh or spec.mesh, rollout.devices, spec.model, memory, rollout.slots)
    trained, _ = setup.dtypes(spec.model)
    # Devices of its own hold nothing else.
    policies = [policy for policy in (spec, setup.critic_spec) if policy is not None and setup.sampling_mesh is None]
    held = [(policy, *setup.abstract(policy)) for policy in policies]
    references = setup.keeps_reference and setup.sampling_mesh is None
    newer = trained if rollout.max_staleness else ()
    room = room_of(rollout.memory, memory, mesh, spec.model, held, references=references, newer=newer)
    tokenizer = setup.source.tokenizer
    try:
        return Engine(
            spec.model,
            mesh,
            slots=rollout.slots,
            max_length=setup.recipe.data.max_length if setup.samples else spec.length,
            cache_dtype=rollout.cache_dtype,
            decode=tokenizer and tokenizer.decode,
            moving=() if spec.adapter is None else tuple(trained),
            room=room,
            speculate=rollout.speculate,
            bring=bring_of(spec.model, spec.mesh, mesh),
        )
    except NoRoom as error:
        assert room is not None, "where the memory is not known there is room for everything"
        assert memory is not None
        raise UserError(f"{error}. {shares(rollout.memory, memory, room, error.need)}") from error


def servers_of(setup: Setup) -> ServerSampler:
    """The sampler of a run whose completions come from servers, for which its exporter writes weights: in the run
    folder, unless the recipe names another."""
    recipe, rollout, spec, exporter = setup.recipe, setup.recipe.rollout, setup.spec, replace(setup.exporter, card=None)
    bare = replace(exporter, files=exporter.folder)  # an adapter alone, as often as it is published

    def write(path: Path, params: Mapping[str, jax.Array], adapter: bool) -> None:
        (bare if adapter else exporter)(path, spec, dict(params), {}, adapter=adapter)

    longest, tokenizer = recipe.data.max_length if setup.samples else spec.length, setup.source.tokenizer
    config = spec.model.config
    expected = Expected(
        config.vocab_size,
        longest,
        None if tokenizer is None else tuple(tokenizer.encode(TEXT)),
        rollout.temperature,
        setup.tolerance,
        Routing(*config.routed, config.experts.number) if config.routed and config.experts else None,
    )
    folder = Path(rollout.weights_folder or Path(recipe.output) / "weights")
    handover = Handover(folder, write, moves_alone(spec.adapter))
    probe = Probe(spec.model, spec.mesh, spec.length, expected)
    return ServerSampler(rollout.servers, rollout.timeout, handover, probe, tokenizer and tokenizer.decode)
