"""Small real decoders, ragged sequences and trainers for the tests. RICH has every switch of the decoder on."""

from pathlib import Path
from typing import Literal

import jax
import numpy as np

from tunix.config import DType, GradientSums, MeshConfig
from tunix.distributed.global_arrays import own_part
from tunix.lora.adapt import adapt, quantization, started
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh, row_shards
from tunix.models.config import DecoderConfig, Rope, is_own
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import simulated
from tunix.models.quantization.rules import Rules
from tunix.models.scan import Remat
from tunix.rollout.engine.engine import Engine
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.export import Exporter
from tunix.trainer.frozen_model import reference_of
from tunix.trainer.learner import Learner
from tunix.trainer.microbatches import Microbatcher, TrainerSpec
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.sampler_mesh import bring_of
from tunix.trainer.state_files import load_state
from tunix.trainer.step import TrainState
from tunix.trainer.trainer import Trainer
from tunix.types import Sequence

PLAIN = DecoderConfig(
    family="llama",
    vocab_size=96,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=64,
    activation="silu",
    norm_eps=1e-5,
    tied=False,
    max_positions=256,
    rope=Rope(theta=10_000.0),
)

RICH = DecoderConfig(
    family="gemma3",
    vocab_size=96,
    d_model=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    ffn=48,
    activation="gelu_tanh",
    norm_eps=1e-6,
    tied=True,
    max_positions=256,
    rope=Rope(theta=1e6),
    norm_offset=True,
    post_norms=True,
    qk_norm=True,
    qkv_bias=True,
    scale_embeddings=True,
    attention_softcap=20.0,
    logit_softcap=5.0,
    window=5,
    local_layers=(True, False, True),
    rope_local=Rope(theta=1e4),
)


def sequences(number: int, seed: int = 0, longest: int = 24, vocab: int = 96) -> list[Sequence]:
    """Ragged random sequences; about half of each one's tokens are trained."""
    rng = np.random.default_rng(seed)

    def one() -> Sequence:
        length = int(rng.integers(4, longest + 1))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        return Sequence(rng.integers(0, vocab, length).astype(np.int32), mask, float(rng.choice([0.5, 1.0, 2.0])))

    return [one() for _ in range(number)]


def trainer(
    config: DecoderConfig = PLAIN,
    *,
    devices: int = 1,
    mesh: MeshConfig | None = None,
    rows: int = 4,
    length: int = 24,
    optimizer: OptimizerConfig | None = None,
    adapter: AdapterConfig | None = None,
    rules: Rules | None = None,
    compute: Literal["fp8"] | None = None,
    dtype: DType = "float32",
    param_dtype: DType = "float32",
    remat: Remat = "none",
    gradient_sums: GradientSums = "compute",
    router_aux_loss_coef: float = 0.0,
    has_scalar_head: bool = False,
    has_lm_head: bool = True,
    reference: bool = False,
    seed: int = 0,
) -> Trainer:
    """A trainer with random weights on the first `devices` virtual devices."""
    placed = build_mesh(mesh or MeshConfig(), jax.devices()[:devices])
    adapted = adapt(adapter, config) if adapter else None
    switches = {
        "remat": remat,
        "gradient_sums": gradient_sums,
        "router_aux_loss_coef": router_aux_loss_coef,
        "has_scalar_head": has_scalar_head,
        "has_lm_head": has_lm_head,
        "quantization": quantization(adapter),
        "compute": compute,
    }
    model = Model(config, dtype=dtype, adapt=adapted, simulated=simulated(rules), **switches)
    params = model.init(jax.random.key(seed), dict.fromkeys(model.shapes, param_dtype), placed)
    trained = {name: x for name, x in params.items() if adapter is None or is_own(name)}
    frozen = {name: x for name, x in params.items() if name not in trained}
    if adapter is not None:
        trained = started(adapter, model, trained, frozen, param_dtype, placed)
    optimizer = optimizer or OptimizerConfig(learning_rate=1e-2, schedule="constant")
    spec = TrainerSpec(
        model=model,
        mesh=placed,
        optimizer=build_optimizer(optimizer, 100, {name: model.axes[name] for name in trained}),
        schedule=build_schedule(optimizer, 100),
        microbatcher=Microbatcher(-(-rows // row_shards(placed)) * row_shards(placed), placed),
        length=length,
        seed=seed,
        adapter=adapter,
        skips_nonfinite=optimizer.on_nonfinite == "skip",
    )
    return local_client(spec, trained, frozen, reference=reference, exporter=Exporter(rules=rules))


def local_client(
    spec: TrainerSpec, params: Params, frozen: Params, *, reference: bool = False, exporter: Exporter | None = None
) -> Trainer:
    """A trainer over weights that are on the mesh, with an engine on the same devices."""
    learner = Learner(spec, params, frozen, reference_of(spec, params, frozen, kept=reference))
    mesh, moving = own_part(spec.mesh), () if spec.adapter is None else tuple(params)
    bring = bring_of(spec.model, spec.mesh, mesh)
    engine = Engine(spec.model, mesh, max_length=spec.length, moving=moving, bring=bring)
    return Trainer(learner, engine, exporter or Exporter())


class StateClient(Trainer):
    """A client that has a train state and nothing else, for tests of checkpoints."""

    def __init__(self, state: TrainState):
        self._held = state

    @property
    def state(self) -> TrainState:
        return self._held

    def load(self, path: Path) -> None:
        self._held = load_state(path, self._held)
