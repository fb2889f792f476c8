"""google/tunix's worker: its trainers and its vanilla sampler. Runs where `import tunix` means theirs."""

from turns import reward, start, words

case, turn = start()

import jax  # noqa: E402  (after the cores are chosen; this tunix is theirs)
import numpy as np  # noqa: E402
import optax  # noqa: E402
import qwix  # noqa: E402
from flax import nnx  # noqa: E402
from google_llama import config, mesh, weights  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from tunix.generate import sampler as sampling  # noqa: E402
from tunix.rl import rl_cluster as clusters  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402
from tunix.sft import utils  # noqa: E402
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig  # noqa: E402
from tunix.sft.dpo.dpo_trainer import TrainingInput as Pairs  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput  # noqa: E402

FOREVER = 1_000_000
BOS = 1
"""Their sampler puts it before every prompt, and pads to the next power of two where it has no room."""
PROJECTIONS = r".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def optimizer() -> optax.GradientTransformation:
    """AdamW with clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(case["clip_norm"]), optax.adamw(case["learning_rate"]))


def given(model: nnx.Module, item: object):
    """One batch without end; a turn ends when the new weights are computed."""
    while True:
        jax.block_until_ready(nnx.state(model))
        turn()
        yield item


def sft() -> None:
    """SFT by their trainer with its default loss."""
    model = weights(case["weights"])
    if case["lora"]:
        how = qwix.LoraProvider(module_path=PROJECTIONS, rank=case["lora"]["rank"], alpha=case["lora"]["alpha"])
        model = qwix.apply_lora_to_model(model, how, **model.get_model_input())
    rows = np.array(case["rows"], np.int32)
    trainer = PeftTrainer(model, optimizer(), TrainingConfig(eval_every_n_steps=FOREVER, max_steps=FOREVER))

    def inputs(x: TrainingInput) -> dict:
        mask = x.input_tokens >= 0
        named = {"positions": utils.build_positions_from_mask(mask)}
        named["attention_mask"] = utils.make_causal_attn_mask(mask)
        return {"input_tokens": x.input_tokens, "input_mask": x.input_mask, **named}

    trainer = trainer.with_gen_model_input_fn(inputs)
    trainer.train(given(model, TrainingInput(input_tokens=rows, input_mask=np.ones_like(rows))))


def dpo() -> None:
    """DPO by their trainer; prompts are computed for both sides."""
    sides = {name: np.array(case[name], np.int32) for name in ("prompts", "chosen", "rejected")}
    names = {"prompts": "prompt", "chosen": "chosen", "rejected": "rejected"}
    arrays = {f"{names[name]}_ids": ids for name, ids in sides.items()}
    masks = {f"{names[name]}_mask": np.ones_like(ids) for name, ids in sides.items()}
    model = weights(case["weights"])
    asked = DPOTrainingConfig(eval_every_n_steps=FOREVER, max_steps=FOREVER, beta=case["beta"])
    DPOTrainer(model, weights(case["weights"]), optimizer(), asked).train(given(model, Pairs(**arrays, **masks)))


def grpo() -> None:
    """GRPO by their learner with the vanilla rollout, all roles on one mesh."""
    length = len(case["prompts"][0]) + BOS
    rollout = RolloutConfig(
        max_tokens_to_generate=case["new"],
        max_prompt_length=length,
        kv_cache_size=length + case["new"],
        temperature=1.0,
    )
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    training = clusters.RLTrainingConfig(
        actor_optimizer=optimizer(),
        eval_every_n_steps=FOREVER,
        max_steps=FOREVER,
        mini_batch_size=case["groups"],
        train_micro_batch_size=case["groups"],
    )
    model = weights(case["weights"])
    cluster = clusters.RLCluster(
        actor=model,
        reference=weights(case["weights"]),
        tokenizer=AutoTokenizer.from_pretrained(case["weights"]),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), training_config=training, rollout_config=rollout
        ),
    )
    settings = GRPOConfig(num_generations=case["group"], num_iterations=1, beta=case["kl"])

    def scored(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return reward(completions)

    def steps():
        texts, at = [words(ids) for ids in case["prompts"]], 0
        while True:
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            turn()
            # An array: they repeat each leaf of the batch, and of a list every text is one.
            yield {"prompts": np.array([texts[(at + i) % len(texts)] for i in range(case["groups"])])}
            at += case["groups"]

    GRPOLearner(cluster, settings, scored).train(steps())


def generate() -> None:
    """Completions in a static batch as long as its longest request, in a cache of that length."""
    c, prompts, new = config(case["weights"]), [words(ids) for ids in case["prompts"]], case["new"]
    length = len(case["prompts"][0]) + BOS
    cache = sampling.CacheConfig(length + max(new), c.num_layers, c.num_kv_heads, c.head_dim)
    tokenizer = AutoTokenizer.from_pretrained(case["weights"])
    engine = sampling.Sampler(weights(case["weights"]), tokenizer, cache)
    tokens = 0
    while True:
        turn(tokens=tokens)
        # An id that is no token's, so that nothing ends early; their greedy mode is the default, this one samples.
        engine(prompts, max(new), max_prompt_length=length, eos_tokens=[-1], temperature=1.0, top_p=1.0, seed=0)
        tokens = sum(new)


with mesh:
    {"sft": sft, "dpo": dpo, "grpo": grpo, "generate": generate}[case["kind"]]()
