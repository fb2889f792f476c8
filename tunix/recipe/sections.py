"""`Sections`: the sections of the recipe of one run, and the rules across them. Loads without jax.

The rules name contradictions, settings without effect, and missing sections. `Recipe` (`recipe.py`) adds stages, files
and the tiny form.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from tunix.algorithms.config import PolicyConfig
from tunix.algorithms.distill.config import POLICY, PROMPTS, SHOWN, DistillConfig, TeacherConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import AlgorithmConfig, Config, MeshConfig, ModelConfig, Place, Positive, RowKind
from tunix.data.config import EPISODES
from tunix.errors import PASSWORD, UserError, nearest
from tunix.lora.config import NOT_IN_FP8, AdapterConfig
from tunix.models.families.table import from_recipe
from tunix.models.quantization.rules import QuantizationConfig
from tunix.recipe.algorithms import ALGORITHMS, algorithm_config
from tunix.rollout.config import EvalConfig, RolloutConfig
from tunix.rollout.environments.config import PACKAGES, MixtureConfig
from tunix.rollout.rewards.config import JudgeConfig, RewardConfig
from tunix.trainer.config import CheckpointConfig, LoggingConfig, OptimizerConfig
from tunix.util.object_store import url_of


class Sections(Config):
    """The sections of one run."""

    model: ModelConfig
    adapter: AdapterConfig | None = None
    quantization: QuantizationConfig | None = None
    """Simulates rounding during training (QAT), for a model that will be quantized."""
    data: MixtureConfig
    algorithm: SerializeAsAny[AlgorithmConfig] = SFTConfig()
    teacher: TeacherConfig | None = None
    """The model that the student learns from, with `algorithm: {name: distill}`."""
    reward: RewardConfig | None = None
    """How completions of the model are scored: for training, and on the rows of `data.eval`."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig | Literal["auto"] = "auto"
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    eval: EvalConfig = EvalConfig()
    batch_size: Positive = 32
    """Sequences per update over all devices; prompts per step where the policy writes the completions."""
    micro_batch_size: Positive | None = None
    """Sequences per micro-batch (gradient accumulation); does not change the result."""
    steps: Positive | None = None
    """Number of updates; or set `epochs`. One epoch where neither is set."""
    epochs: Positive | None = None
    """Number of epochs over the training rows, instead of `steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: initial weights, order of the rows, noise, sampling."""
    output: Place
    """The run folder; by default `runs/` and the name of the recipe's file."""

    @property
    def sequences_per_update(self) -> int:
        """Number of sequences in one optimizer update."""
        return self.algorithm.sequences_per_update(self.batch_size)

    @property
    def plays(self) -> bool:
        """Whether an environment answers the model, for the prompts of one data set at least."""
        return self.rollout.environment is not None or any(source.in_environment for source in self.data.sources)

    @property
    def rewarded(self) -> bool:
        """Whether completions are scored: those of one data set at least."""
        return self.reward is not None or self.plays or any(source.reward for source in self.data.sources)

    @property
    def row_kind(self) -> RowKind:
        """What is read of a row: all columns where an environment renders the prompts, else what the algorithm says."""
        reads = self.algorithm.reads
        return RowKind.ROW if reads == RowKind.PROMPT and self.rollout.environment is not None else reads

    @field_validator("algorithm", mode="before")
    @classmethod
    def _choose(cls, value: Any) -> Any:
        return algorithm_config(value).model_validate(value) if isinstance(value, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, value: Any) -> Any:
        """The rows of an environment where no others are set; one epoch where no length is set; importance weights
        where servers sample and the recipe says nothing of them."""
        if not isinstance(value, Mapping):
            return value
        sections = dict(value)
        if rows_left_out(value):
            sections["data"] = {**(value.get("data") or {}), "train": EPISODES}
        if value.get("steps") is None and value.get("epochs") is None:
            sections["epochs"] = 1
        rollout, algorithm = value.get("rollout"), value.get("algorithm")
        preset = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
        if isinstance(preset, str) and preset in PROMPTS:
            # The model itself teaches, with its present weights or those that it starts from.
            model, teacher = value.get("model"), value.get("teacher")
            start = model.get("path") if isinstance(model, Mapping) else None
            source = start if preset == "opsd" and start else POLICY
            if teacher is None or isinstance(teacher, Mapping):
                sections["teacher"] = {"path": source, "prompt": PROMPTS[preset], **(teacher or {})}
        on_servers = isinstance(rollout, Mapping) and rollout.get("engine") == "vllm"
        if on_servers and isinstance(algorithm, Mapping) and algorithm.get("old_logprobs") != "sampler":
            with suppress(UserError):  # the name itself is the mistake, and reported where it is resolved
                if "correction" in algorithm_config(algorithm).model_fields and "correction" not in algorithm:
                    sections["algorithm"] = {**algorithm, "old_logprobs": "recompute", "correction": "truncate"}
        return sections


def rows_left_out(sections: Mapping[str, Any]) -> bool:
    """Whether a recipe names no rows, and an environment of another package, which may make its own."""
    data, rollout = sections.get("data"), sections.get("rollout")
    environment = rollout.get("environment") if isinstance(rollout, Mapping) else None
    if isinstance(environment, str):
        environment = {"name": environment}
    if not isinstance(environment, Mapping) or (isinstance(data, Mapping) and "train" in data):
        return False
    package = str(environment.get("name")).partition(":")[0]
    return bool({*environment, package} & set(PACKAGES) or nearest(package, PACKAGES))  # a mistyped one is told later


def complaints(recipe: Sections, staged: bool) -> Iterator[str]:
    """Messages about sections that do not fit together, each with its key. The keys of a stage (`staged`) may be meant
    for another one."""
    model = recipe.model
    for section, value in recipe.model_dump(mode="json").items():
        if address := PASSWORD.search(str(value)):
            end = str(value)[address.end() :][:40].partition("'")[0]
            yield f"{section}: the address of {end} has a password, which the run folder would keep: leave it out"
    if url := url_of(recipe.output):
        yield (
            f"output: {url} is on an object store, which holds no lock and appends to no file: keep the run on a disk, "
            f"then `tunix export RUN {url}`; its checkpoints may be on gs://, checkpoint.folder"
        )
    if (url := url_of(recipe.checkpoint.folder or "")) and not url.startswith("gs://"):
        yield f"checkpoint.folder: {url}: Orbax writes to gs:// and to disks alone; take one of them"
    if model.init == "random":
        try:
            decoder = from_recipe(model)
        except UserError as error:
            yield f"model.{error}"
        else:
            if model.family not in (None, decoder.family):
                yield f"model.family: {model.family!r} is not that of preset {model.preset!r}; leave it out"
    if model.mtp == "freeze" and not recipe.rollout.speculate:
        yield (
            f"model.mtp: {model.mtp} loads a head that makes draft tokens, and rollout.speculate asks for none: set it "
            "to 1 or more, or leave model.mtp out"
        )
    if model.mtp == "train" and (recipe.adapter is not None or not recipe.algorithm.has_lm_head):
        why = "trains weights of the base, which an adapter leaves as they are"
        why = why if recipe.adapter is not None else f"predicts tokens, and {recipe.algorithm.name} trains scores"
        yield f"model.mtp: train {why}: leave it out" + (", or set it to freeze" if recipe.adapter is not None else "")
    if recipe.steps and recipe.epochs:
        yield f"steps and epochs: {recipe.steps} and {recipe.epochs}; give one, or clear one with `epochs=null`"
    if recipe.steps and recipe.logging.profile and (beyond := recipe.logging.profile.beyond(recipe.steps)):
        yield beyond
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
    if isinstance(recipe.algorithm, PolicyConfig):
        if recipe.algorithm.observation_weight and not recipe.plays:
            yield "algorithm.observation_weight: changes nothing without an environment: set rollout.environment"
        if recipe.algorithm.penalties_over == "whole" and not recipe.rollout.top_k:
            yield (
                "algorithm.penalties_over: every set is the whole without rollout.top_k, which cuts ids off; leave it "
                "out"
            )
    if recipe.data.pictures:
        environment = recipe.rollout.environment
        if not recipe.algorithm.sees_pictures:
            yield (
                f"data.pictures: {recipe.algorithm.name} looks at none as it is set here; sft and grpo do, and dpo on "
                "given pairs with a reference that is not precomputed, no loss that sorts and no policy_weights: "
                "leave it out"
            )
        blind = {
            "rollout.engine: vllm, whose servers are sent none": recipe.rollout.engine == "vllm",
            "rollout.environment.agent, which asks in its own words": environment is not None
            and environment.agent is not None,
            "rollout.history: template, which renders every turn anew": recipe.plays
            and recipe.rollout.history == "template",
            "rollout.max_staleness, whose journal keeps none": recipe.rollout.max_staleness > 0,
            "reward.model, which judges the text alone": recipe.reward is not None and recipe.reward.model is not None,
            "reward.judge, which reads the text alone": recipe.reward is not None and recipe.reward.judge is not None,
        }
        for what, is_set in blind.items():
            if is_set:
                yield f"data.pictures: not seen by {what}; leave one of the two out"
    if recipe.adapter is not None and recipe.adapter.source and model.init == "random":
        yield "adapter.from: an adapter belongs to the base that it was trained on; this one is random: set model.path"
    if recipe.optimizer.on_nonfinite == "rollback":
        saving, rollout = recipe.checkpoint, recipe.rollout
        wrong = {
            "there are none before the end with checkpoint.every: null: set it": not (
                saving.every or saving.every_minutes
            ),
            "what rollout.max_staleness samples ahead would be of weights that are gone": rollout.max_staleness > 0,
            "servers (rollout.engine: vllm) would be sent other weights under the same number": rollout.engine
            != "tunix",
        }
        for why in (why for why, is_so in wrong.items() if is_so):
            yield f"optimizer.on_nonfinite: rollback goes back to a checkpoint, and {why}; or take skip"
    if recipe.optimizer.lora_plus and recipe.adapter is None:
        yield "optimizer.lora_plus: changes nothing without an adapter section, whose B it is about"
    if model.quantization is not None:
        key = f"model.quantization: compute {model.quantization.compute}"
        if recipe.quantization is not None:
            yield (
                f"{key} and quantization: {recipe.quantization.mode} round the same matrices: the first is for speed, "
                "the second for a model that is rounded later; leave one of them out"
            )
        if recipe.adapter is not None and recipe.adapter.kind == "qlora":
            yield f"{key}: {NOT_IN_FP8}"
        if recipe.rollout.engine == "vllm":
            yield f"{key}: servers multiply these weights in their own dtype: sample with rollout.engine: tunix"
    if recipe.adapter is not None and recipe.adapter.dropout and recipe.algorithm.reads == RowKind.PROMPT:
        yield (
            f"adapter.dropout: {recipe.adapter.dropout:g} would have the trainer compute other log-probs than the "
            f"sampler used, which {recipe.algorithm.name} learns from; set it to 0"
        )
    yield from _ineffective_evaluation(recipe)
    rules, name = recipe.quantization, recipe.algorithm.name
    if recipe.rollout.engine == "vllm" and rules is not None and rules.inputs:
        yield (
            f"quantization: {rules.mode} rounds activations too, which servers do not do to these weights: sample with "
            "rollout.engine: tunix"
        )
    yield from _of_rows(recipe, staged)
    yield from _ineffective_rewards(recipe, staged)
    if recipe.reward is not None and recipe.reward.judge is not None:
        yield from _misjudged(recipe, recipe.reward.judge)
    if recipe.algorithm.learns_from_teacher:
        if recipe.teacher is None:
            yield f"teacher: {name} learns from one: name it, as in `teacher: {{path: google/gemma-3-4b-it}}`"
        elif recipe.teacher.tells_tokens:
            yield from _untold(recipe, f"a teacher {recipe.teacher.tells_tokens}")
        elif recipe.teacher.is_stored:
            algorithm, begin = recipe.algorithm, "teacher.path: stored log-probs are of the rows' own texts"
            if recipe.algorithm.reads == RowKind.PROMPT:
                yield f"{begin}, and {name} learns from completions of the policy here: load the teacher"
            if isinstance(algorithm, DistillConfig) and algorithm.top_k:
                yield f"algorithm.top_k: {algorithm.top_k} changes nothing beside what `tunix score --top-k` has stored"
            if recipe.data.cuts or recipe.data.pictures:
                yield f"{begin}, whole and without pictures: leave data.packing at true or false, and data.pictures out"
        if isinstance(recipe.algorithm, DistillConfig) and recipe.algorithm.success is not None:
            prompts = [x.prompt or "" for x in recipe.teacher.each.values()] if recipe.teacher else []
            if not all(any(f"{{{name}}}" in prompt for name in SHOWN) for prompt in prompts):
                yield (
                    "algorithm.success: the teacher is shown nothing of what was sampled: write {attempt} or "
                    "{feedback} where it is to stand in teacher.prompt, or leave success out"
                )
    elif recipe.teacher is not None and name in ALGORITHMS and not staged:
        follow = "; set algorithm.teacher_kl, or leave it out" if name == "grpo" else ""
        yield f"teacher: changes nothing for {name}; algorithm: {{name: distill}} learns from one{follow}"


def _untold(recipe: Sections, teacher: str) -> Iterator[str]:
    """Settings that need more of a teacher than log-probs of what was sampled; a server tells them at temperature 1."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if isinstance(algorithm, DistillConfig) and algorithm.divergence != "sampled":
        yield (
            f"teacher.path: {teacher} tells log-probs of what was sampled, and divergence: {algorithm.divergence} "
            "compares whole distributions: set algorithm.on_policy: true and divergence: sampled, or load one with the "
            "student's vocabulary here"
        )
    elif isinstance(algorithm, DistillConfig) and (recipe.data.eval or recipe.data.eval_split):
        key = "data.eval" if recipe.data.eval else "data.eval_split"
        yield f"{key}: held-out rows are compared by whole distributions, which {teacher} does not tell"
    served = recipe.teacher is not None and recipe.teacher.is_served
    for key, whole in {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}.items():
        if getattr(rollout, key) != whole and (served or key != "temperature"):
            yield f"rollout.{key}: {teacher} tells log-probs of its whole distribution: leave it at {whole}"
    if recipe.data.pictures:
        yield f"data.pictures: {teacher} is shown none: load one with the student's vocabulary here"


def _ineffective_evaluation(recipe: Sections) -> Iterator[str]:
    """Messages about settings of `eval` without what they are about: held-out rows, and what answers a task."""
    config, default = recipe.eval, EvalConfig()
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    idle = {key for key in EvalConfig.model_fields if getattr(config, key) != getattr(default, key)}
    if config.tasks:
        idle -= {"every", "tasks", "until"}
        idle |= {f"until: {name}" for name in config.until if re.match("eval/(loss|rewards?)(/|$)", name)}
    if idle and not held_out:
        names = ", ".join(f"eval.{key}" for key in sorted(idle))
        yield f"{names}: changes nothing without held-out rows; set data.eval or data.eval_split"
    environment = recipe.rollout.environment
    if config.samples and environment is not None and environment.agent is not None:
        yield f"eval.samples: {config.samples} prompts to answer, and an agent asks by itself; leave it out"
    for number, task in enumerate(config.tasks):
        task = task.in_run(recipe.rollout.environment, recipe.reward)
        if task.environment is None and task.reward is None and not task.harness_task:
            yield (
                f"eval.tasks.{number}: nothing scores the answers of {task.name}: give it an environment, or rewards, "
                "as in reward: {functions: [number]}"
            )
        if not (held_out or task.data or (task.environment and task.environment.package)):
            yield f"eval.tasks.{number}: {task.name} has no rows: name some, data: FILE"


def _misjudged(recipe: Sections, judge: JudgeConfig) -> Iterator[str]:
    """Messages about a judge that cannot judge this run."""
    where, algorithm, rewards = f"reward.judge.model: {judge.model}", recipe.algorithm, recipe.reward
    adapter, base = recipe.adapter, judge.model == "base"
    pairs = algorithm.name == "dpo" and algorithm.learns_from_rewards and algorithm.samples_per_prompt == 2
    others = (rewards is not None and (rewards.functions or rewards.model)) or recipe.rollout.environment
    wrong = {
        f"{where} is the frozen base under an adapter, and here all weights train: it would be a second copy of the "
        "model. Name the folder of that copy, or train an adapter": base and adapter is None,
        f"{where} is no longer there where adapter.also trains a part of it: name its folder": base
        and adapter is not None
        and bool(adapter.also),
        f"{where} is on the servers with rollout.engine: vllm: start one with the base for judging, and name its "
        "address, as in http://host:8000/v1": base and recipe.rollout.engine == "vllm",
        f"{where} would wait for the devices that learn with rollout.max_staleness: judge on a server "
        "(http://HOST/v1), or leave max_staleness out": not judge.is_server and recipe.rollout.max_staleness > 0,
        f"reward.judge.pairwise: compares a prompt's two completions, and {algorithm.name} as it is set here has no "
        "two: it is for `algorithm: {name: dpo, online: true, group_size: 2}`": judge.pairwise and not pairs,
        "reward.judge.pairwise: compares, and a held-out row has one answer: add a reward function, or leave data.eval "
        "out": judge.pairwise and not others and bool(recipe.data.eval or recipe.data.eval_split),
    }
    yield from (message for message, is_so in wrong.items() if is_so)


def _of_rows(recipe: Sections, staged: bool) -> Iterator[str]:
    """Messages about mixtures, curricula and turns that do not fit the rest of the recipe."""
    data, name, rollout = recipe.data, recipe.algorithm.name, recipe.rollout
    writes, curriculum = recipe.algorithm.reads == RowKind.PROMPT, data.curriculum
    for number, source in enumerate(data.sources):
        key = f"data.train.{number}"
        for section in ("reward", "environment") if not (writes or staged) else ():
            if getattr(source, section) is not None:
                yield f"{key}.{section}: changes nothing for {name}, which trains on the rows' own; leave it out"
        if source.reward is not None and (source.reward.model or (recipe.reward and recipe.reward.model)):
            yield f"{key}.reward: a reward model scores all data sets or none; take functions here, and no reward.model"
        scored = source.reward or source.environment or recipe.reward or rollout.environment
        if recipe.algorithm.learns_from_rewards and recipe.rewarded and not scored:
            yield f"{key}.reward: nothing scores the completions of {source.name}: name rewards here, or in `reward`"
        if source.in_environment and rollout.in_flight == "continue":
            why = f"the episodes of {source.name} are not paused for new weights"
            yield f"rollout.in_flight: continue: {why}; leave it out"
    if data.sources and writes and isinstance(data.eval, str) and recipe.reward is None and rollout.environment is None:
        yield "data.eval: nothing scores its completions: make it a list with the names of data.train, or set `reward`"
    if curriculum is not None:
        by = f"data.curriculum: {{by: {curriculum.by}}}"
        if not writes and not staged:
            yield f"{by} orders prompts whose completions the policy writes, and {name} trains on those of the rows"
        if curriculum.by in ("success", "level"):
            if not recipe.rewarded:
                yield f"{by} reads rewards, and there are none: set `reward`, or take a column"
            for key, is_set in {
                "oversample": rollout.oversample > 1,
                "max_staleness": rollout.max_staleness > 0,
            }.items():
                if is_set:
                    yield f"rollout.{key}: {by} chooses prompts by what came of all before; leave one of the two out"
        if data.sources and curriculum.by != "success":
            yield f"{by} would sort several data sets into one order, against their weights; leave one of the two out"
    if data.turns and recipe.algorithm.reads != RowKind.COMPLETION and not staged:
        yield f"data.turns: {data.turns} is about conversations that are trained on as they are; {name} reads others"


def _ineffective_rewards(recipe: Sections, staged: bool) -> Iterator[str]:
    """Messages about settings of rewards and rollouts that are missing or have no effect."""
    if recipe.algorithm.reads != RowKind.PROMPT and not staged:
        for key in recipe.logging.samples.changed(("every", "groups")):
            yield f"logging.samples.{key}: changes nothing for {recipe.algorithm.name}, which trains on no completions"
    # Limits that have no effect where the model writes no completions; given pairs have a `completion_length`.
    pairs = recipe.algorithm.reads == RowKind.PAIRS
    lengths = ("prompt_length",) if pairs else ("prompt_length", "completion_length")
    if not recipe.algorithm.has_lm_head and not staged:
        why = f"{recipe.algorithm.name} trains a model that gives scores and writes nothing"
        for key in recipe.changed(("reward", "rollout")):
            yield f"{key}: changes nothing, since {why}; leave the section out"
        for key in lengths:
            if getattr(recipe.data, key):
                yield f"data.{key}: changes nothing, since {why}; max_length is the limit"
        if recipe.adapter is not None and "lm_head" in recipe.adapter.also:
            yield f"adapter.also: lm_head trains nothing, since {why}; leave it out"
        if recipe.eval.samples:
            yield f"eval.samples: {recipe.eval.samples} completions to show, but {why}; leave it out"
        if recipe.eval.tasks:
            yield f"eval.tasks: prompts to answer, but {why}; leave them out"
        return
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    rewarded = recipe.rewarded
    writes = recipe.algorithm.reads == RowKind.PROMPT
    tasks = recipe.eval.tasks
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
    used = held_out or any(not (task.environment or task.reward or task.harness_task) for task in tasks)
    if rewarded and not used and not (writes and recipe.reward is None):
        yield f"reward: {recipe.algorithm.name} does not train on rewards; to evaluate by them, set data.eval"
    for key in lengths:
        if getattr(recipe.data, key) and not (rewarded or writes or tasks):
            yield f"data.{key}: changes nothing where the model writes no completions; max_length is the limit"
    if not (rewarded or writes or tasks) and recipe.rollout != RolloutConfig():
        yield f"rollout: changes nothing for {recipe.algorithm.name} without a reward"
    elif not writes:
        changed = {"oversample": recipe.rollout.oversample > 1, "max_staleness": recipe.rollout.max_staleness > 0}
        for name in (name for name, is_set in changed.items() if is_set):
            yield f"rollout.{name}: changes nothing for {recipe.algorithm.name}, which trains on no completions"
