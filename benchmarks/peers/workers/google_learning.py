"""google/tunix's worker of `benchmarks.learning`: `GRPOLearner` with the vanilla sampler on a task of reasoning-gym.

Runs where `import tunix` means theirs.
"""

from collections.abc import Iterator

import numpy as np
import optax
from google_llama import config, mesh, weights
from problems import Problems
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

NEVER = 1_000_000
problems = Problems()
case = problems.case
tokenizer = AutoTokenizer.from_pretrained(case["weights"])
shape = config(case["weights"])
length = max(len(tokenizer(x).input_ids) for kind in ("train", "held_out") for x in problems.questions(kind))
ROOM = 1 << (length - 1).bit_length()
"""Tokens of a prompt: their sampler pads to a power of two."""


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Prompts in an order of their own; measures before every so many steps, when the step before has ended."""
    questions = problems.questions("train")
    order = np.random.default_rng(case["seed"]).permutation(len(questions))
    for step in range(case["steps"] + 1):
        if step % case["every"] == 0:
            sampler = Sampler(
                cluster.actor_trainer.model,
                tokenizer,
                CacheConfig(ROOM + case["new"], shape.num_layers, shape.num_kv_heads, shape.head_dim),
            )
            answers = sampler(problems.questions("held_out"), case["new"], max_prompt_length=ROOM, temperature=0.0)
            problems.measured(step, answers.text)
        if step < case["steps"]:
            chosen = order[np.arange(step * case["prompts"], (step + 1) * case["prompts"]) % len(order)]
            yield {"prompts": np.array([questions[i] for i in chosen])}


with mesh:
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    rates = optax.linear_schedule(case["learning_rate"] / case["warmup"], case["learning_rate"], case["warmup"] - 1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(case["clip_norm"]),
        optax.adamw(rates, b2=case["b2"], weight_decay=0.0),
    )
    cluster = clusters.RLCluster(
        actor=weights(case["weights"]),
        reference=weights(case["weights"]),
        tokenizer=tokenizer,
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=clusters.RLTrainingConfig(
                actor_optimizer=optimizer,
                eval_every_n_steps=NEVER,
                max_steps=NEVER,
                mini_batch_size=case["prompts"] // case["updates"],
                train_micro_batch_size=case["prompts"] // case["updates"],
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=case["new"],
                max_prompt_length=ROOM,
                kv_cache_size=ROOM + case["new"],
                temperature=1.0,
            ),
        ),
    )
    settings = GRPOConfig(
        num_generations=case["group"], num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"
    )

    def scored(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        """The verifier's scores."""
        return problems.scores(list(prompts), completions)

    GRPOLearner(cluster, settings, scored).train(batches())
