"""The Llama shapes that training is measured on, and the FLOPs of a step of them.

Axes: B rows, T time, N query heads, H head dim, L layers.
"""

from dataclasses import dataclass

import numpy as np

from tunix.config import CacheType, DType, MeshConfig
from tunix.data.packing import pack, row_length
from tunix.lora.adapt import adapt, quantization
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.config import DecoderConfig, Rope, is_adapter
from tunix.models.model import Model
from tunix.models.scan import Remat
from tunix.rollout.engine.engine import Engine
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.export import Exporter
from tunix.trainer.frozen_model import reference_of
from tunix.trainer.learner import Learner
from tunix.trainer.microbatches import Microbatcher, TrainerSpec, answers_per_row
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.perf import training_flops
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Sequence

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="constant")
HALF = OptimizerConfig(learning_rate=1e-4, schedule="constant", b2=0.99, moments_dtype="bfloat16")
"""For shapes whose weights all train in bfloat16: moments of their type."""
LORA = AdapterConfig(rank=16)


@dataclass(frozen=True)
class Shape:
    """One model and one batch."""

    name: str
    config: DecoderConfig
    rows: int
    length: int
    dtype: DType = "float32"
    """Dtype of the computation and of a frozen base."""
    whole: DType = "float32"
    """Dtype of the weights where all of them train; adapters are float32."""
    remat: Remat = "none"
    """What the backward pass computes again of a layer."""
    documents: int = 1
    """Texts of equal length that fill a row."""

    def tokens(self) -> np.ndarray:
        """`[B T]` random ids."""
        rng = np.random.default_rng(0)
        return rng.integers(0, self.config.vocab_size, (self.rows, self.length)).astype(np.int32)

    def batch(self) -> Batch:
        """Full rows, every token trained but the first of a text."""
        texts = np.split(self.tokens(), self.documents, axis=1)
        mask = np.ones(self.length // self.documents, bool)
        sequences = [Sequence(row[i], mask) for i in range(self.rows) for row in texts]
        return pack(sequences, len(sequences), self.length, packing=self.documents > 1)

    def flops(self, adapter: AdapterConfig | None = None) -> float:
        """FLOPs of one step: 6 N T (under a frozen base 4 N T, and 6 of the adapter's) and causal attention."""
        return training_flops(self.config, self.batch(), adapter)

    def together(self, group: int, prompts: int, longest: int, new: int) -> tuple[int, int]:
        """Answers to a prompt that share a row, and tokens of such a row, as a run has them.

        Args:
            group: answers to each of the prompts.
            longest: tokens of a prompt and its answer at most.
            new: tokens of an answer at most.
        """
        import jax

        mesh = build_mesh(MeshConfig(), jax.devices()[:1])
        number = answers_per_row(mesh, self.config, group, prompts * group, longest, new, None)
        return number, row_length(number, longest, new)

    def trainer(
        self,
        adapter: AdapterConfig | None = None,
        *,
        length: int | None = None,
        rows: int | None = None,
        unit: int = 1,
        longest: int | None = None,
        reference: bool = False,
        cache: CacheType | None = None,
        replay: bool = False,
    ) -> Trainer:
        """A trainer with random weights on one device, the whole batch in one micro-batch.

        Args:
            adapter: on a frozen base; None trains all weights.
            length: tokens of a row; None for the shape's.
            rows: rows of a batch; None for the shape's.
            unit: sequences that share a row, and their common beginning there.
            longest: tokens of one sequence at most, where several share a row.
            reference: whether the initial weights are kept as the reference.
            cache: what the sampler's keys and values are kept in; None for the model's dtype.
            replay: whether the trainer rounds keys and values like that too.
        """
        import jax

        mesh = build_mesh(MeshConfig(), jax.devices()[:1])
        adaptation = None if adapter is None else adapt(adapter, self.config)
        base = quantization(adapter)
        model = Model(
            self.config,
            self.dtype,
            self.remat,
            adapt=adaptation,
            quantization=base,
            cache_dtype=cache if replay else None,
        )
        mine = [name for name in model.shapes if is_adapter(name) or adapter is None]
        trains: DType = self.whole if adapter is None else "float32"
        dtypes: dict[str, DType] = {name: trains if name in mine else self.dtype for name in model.shapes}
        params = model.init(jax.random.key(0), dtypes, mesh)
        trained = {name: params[name] for name in mine}
        optimizer = HALF if trains == "bfloat16" else OPTIMIZER
        spec = TrainerSpec(
            model=model,
            mesh=mesh,
            optimizer=build_optimizer(optimizer, 1000, {name: model.axes[name] for name in trained}),
            schedule=build_schedule(optimizer, 1000),
            microbatcher=Microbatcher(rows or self.rows, mesh, unit),
            length=length or self.length,
            seed=0,
            adapter=adapter,
        )
        frozen = {name: x for name, x in params.items() if name not in trained}
        moving = () if adapter is None else tuple(trained)
        engine = Engine(model, mesh, max_length=longest or spec.length, cache_dtype=cache, moving=moving)
        learner = Learner(spec, trained, frozen, reference_of(spec, trained, frozen, kept=reference))
        return Trainer(learner, engine, Exporter())


def llama(vocab_size: int, d_model: int, heads: int, kv_heads: int, ffn: int) -> DecoderConfig:
    """Eight layers of Llama."""
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=8,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=d_model // heads,
        ffn=ffn,
        activation="silu",
        norm_eps=1e-5,
        tied=False,
        max_positions=2048,
        rope=Rope(theta=500_000.0),
    )


SHAPES = {
    "small": Shape("small", llama(4096, 256, 4, 2, 1024), rows=8, length=256),
    "big": Shape("big", llama(32_000, 512, 8, 4, 2048), rows=4, length=512),
}
