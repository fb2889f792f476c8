"""Rules across sections: contradictions, settings without effect, missing sections. Loads without jax."""

from collections.abc import Iterator

from tunix.config import EvalConfig, RowKind
from tunix.errors import UserError
from tunix.models.families.table import preset, small, with_sizes
from tunix.recipe.algorithms import ALGORITHMS
from tunix.recipe.sections import Sections
from tunix.rollout.config import RolloutConfig
from tunix.util.object_store import url_of


def complaints(recipe: Sections, staged: bool) -> Iterator[str]:
    """Messages about sections that do not fit together, each with its key.

    Args:
        staged: whether the recipe is a stage, whose keys may be meant for another stage.
    """
    yield from _disagreements(recipe)
    rules, name = recipe.quantization, recipe.algorithm.name
    if recipe.rollout.engine == "vllm" and rules is not None and rules.inputs:
        yield (
            f"quantization: {rules.mode} rounds activations too, which servers do not do to these weights: sample with "
            "rollout.engine: tunix"
        )
    yield from _ineffective_rewards(recipe, staged)
    if recipe.algorithm.learns_from_teacher:
        if recipe.teacher is None:
            yield f"teacher: {name} learns from one: name it, as in `teacher: {{path: google/gemma-3-4b-it}}`"
    elif recipe.teacher is not None and name in ALGORITHMS and not staged:
        yield f"teacher: changes nothing for {name}; algorithm: {{name: distill}} learns from one"


def _disagreements(recipe: Sections) -> Iterator[str]:
    """Messages about sections that contradict each other, and about models that a family does not support."""
    model = recipe.model
    if url := url_of(recipe.output):
        yield (
            f"output: {url} is on an object store, which holds no lock and appends to no file: keep the run on a disk, "
            f"then `tunix export RUN {url}`; its checkpoints may be on gs://, checkpoint.folder"
        )
    if (url := url_of(recipe.checkpoint.folder or "")) and not url.startswith("gs://"):
        yield f"checkpoint.folder: {url}: Orbax writes to gs:// and to disks alone; take one of them"
    if model.init == "random":
        try:
            decoder = preset(model.preset) if model.preset else small(str(model.family))
            with_sizes(decoder, model.sizes)
        except UserError as error:
            yield f"model.{error}"
        else:
            if model.family not in (None, decoder.family):
                yield f"model.family: {model.family!r} is not that of preset {model.preset!r}; leave it out"
    if recipe.steps and recipe.epochs:
        yield f"steps and epochs: {recipe.steps} and {recipe.epochs}; give one, or clear one with `epochs=null`"
    if recipe.micro_batch_size and recipe.micro_batch_size > (largest := recipe.sequences_per_update):
        named = "batch_size, which is" if largest == recipe.batch_size else "the sequences of an update, which are"
        yield f"micro_batch_size: {recipe.micro_batch_size} is above {named} {largest}"
    warmup = recipe.optimizer.warmup
    if recipe.steps and warmup >= 1 and warmup >= recipe.steps:
        yield (
            f"optimizer.warmup: {warmup:g} steps of warm-up do not end before the run's {recipe.steps}; "
            "below 1 it is a share of them"
        )
    if recipe.quantization is not None and recipe.adapter is not None:
        yield (
            f"quantization: {recipe.quantization.mode} trains the weights that it rounds, and under an adapter they "
            "are frozen: leave one of them out. `adapter: {kind: qlora}` rounds a frozen base; `tunix quantize` rounds "
            "a model whose adapter is merged"
        )
    if recipe.data.cuts and not recipe.algorithm.reads.is_text:
        yield (
            f"data.packing: {recipe.data.packing} cuts a text into pieces, and {recipe.algorithm.name} reads "
            f"{recipe.algorithm.reads.words}, which stay whole; take true or false"
        )
    if recipe.data.pictures:
        yield from _unseen(recipe)
    if recipe.adapter is not None and recipe.adapter.source and model.init == "random":
        yield "adapter.from: an adapter belongs to the base that it was trained on; this one is random: set model.path"
    if recipe.optimizer.lora_plus and recipe.adapter is None:
        yield "optimizer.lora_plus: changes nothing without an adapter section, whose B it is about"
    if recipe.adapter is not None and recipe.adapter.dropout and recipe.algorithm.reads == RowKind.PROMPT:
        yield (
            f"adapter.dropout: {recipe.adapter.dropout:g} would have the trainer compute other log-probs than the "
            f"sampler used, which {recipe.algorithm.name} learns from; set it to 0"
        )
    if recipe.eval != EvalConfig() and not (recipe.data.eval or recipe.data.eval_split):
        default = EvalConfig()
        changed = [key for key in EvalConfig.model_fields if getattr(recipe.eval, key) != getattr(default, key)]
        names = ", ".join(f"eval.{key}" for key in sorted(changed))
        yield f"{names}: changes nothing without held-out rows; set data.eval or data.eval_split"


def _unseen(recipe: Sections) -> Iterator[str]:
    """Messages about what does not look at pictures."""
    if not recipe.algorithm.sees_pictures:
        yield (
            f"data.pictures: {recipe.algorithm.name} looks at none as it is set here; sft and grpo do, and dpo on "
            "is_set pairs with a reference that is neither precomputed nor another model's, and no loss that sorts: "
            "leave it out"
        )
    blind = {
        "rollout.engine: vllm, whose servers are sent none": recipe.rollout.engine == "vllm",
        "rollout.environment, which makes prompts of its own": recipe.rollout.environment is not None,
        "rollout.max_staleness, whose journal keeps none": recipe.rollout.max_staleness > 0,
        "reward.model, which judges the text alone": recipe.reward is not None and recipe.reward.model is not None,
    }
    for what, is_set in blind.items():
        if is_set:
            yield f"data.pictures: not seen by {what}; leave one of the two out"


def _ineffective_rewards(recipe: Sections, staged: bool) -> Iterator[str]:
    """Messages about settings of rewards and rollouts that are missing or have no effect.

    Args:
        staged: whether the recipe is a stage, whose keys may be meant for another stage.
    """
    if not recipe.algorithm.has_lm_head and not staged:
        yield from _ineffective_completions(recipe)
        return
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    rewarded = recipe.reward is not None or recipe.rollout.environment is not None
    writes = recipe.algorithm.reads == RowKind.PROMPT
    yield from recipe.algorithm.complaints(recipe.batch_size)
    if recipe.algorithm.learns_from_rewards:
        if not rewarded:
            yield (
                f"reward: {recipe.algorithm.name} learns from rewards: name some, as in "
                "`reward: {functions: [exact_match]}`, or a rollout.environment that gives them"
            )
        return
    judged = any(name == "eval/reward" or name.startswith("eval/reward/") for name in recipe.eval.until)
    if judged and not (rewarded and held_out):
        yield "eval.until: eval/reward is not measured without a reward section and held-out rows"
    if staged:
        return
    if rewarded and not held_out and not (writes and recipe.reward is None):
        yield f"reward: {recipe.algorithm.name} does not train on rewards; to evaluate by them, set data.eval"
    for key in _ineffective_lengths(recipe):
        if getattr(recipe.data, key) and not (rewarded or writes):
            yield f"data.{key}: changes nothing where the model writes no completions; max_length is the limit"
    if not (rewarded or writes) and recipe.rollout != RolloutConfig():
        yield f"rollout: changes nothing for {recipe.algorithm.name} without a reward"
    elif not writes:
        changed = {"oversample": recipe.rollout.oversample > 1, "max_staleness": recipe.rollout.max_staleness > 0}
        for name in (name for name, is_set in changed.items() if is_set):
            yield f"rollout.{name}: changes nothing for {recipe.algorithm.name}, which trains on no completions"


def _ineffective_lengths(recipe: Sections) -> tuple[str, ...]:
    """Limits that have no effect where the model writes no completions; given pairs have a `completion_length`."""
    return ("prompt_length",) if recipe.algorithm.reads == RowKind.PAIRS else ("prompt_length", "completion_length")


def _ineffective_completions(recipe: Sections) -> Iterator[str]:
    """Messages about settings of completions for a model that writes none."""
    why = f"{recipe.algorithm.name} trains a model that gives scores and writes nothing"
    for key in ("reward", "rollout"):
        if getattr(recipe, key) != Sections.model_fields[key].get_default():
            yield f"{key}: changes nothing, since {why}; leave the section out"
    for key in _ineffective_lengths(recipe):
        if getattr(recipe.data, key):
            yield f"data.{key}: changes nothing, since {why}; max_length is the limit"
    if recipe.adapter is not None and "lm_head" in recipe.adapter.also:
        yield f"adapter.also: lm_head trains nothing, since {why}; leave it out"
    if recipe.eval.samples:
        yield f"eval.samples: {recipe.eval.samples} completions to show, but {why}; leave it out"
