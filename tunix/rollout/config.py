"""The recipe's sections `rollout` and `eval`. Loads without jax."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tunix.config import CacheType, Config, Place, Positive
from tunix.data.config import EPISODES, DataConfig
from tunix.errors import nearest
from tunix.rollout.environments.config import EnvironmentConfig, History
from tunix.rollout.rewards.config import RewardConfig


class RolloutMeshConfig(Config):
    """How devices are used to sample: a copy of the weights on each `tensor` of them, and the slots split over the
    copies."""

    devices: Positive | None = None
    """Devices that only sample, the last ones (of each process as many); `mesh` then has the others. Null: sampling and
    training share all devices."""
    tensor: Positive = 1
    """Devices that share one copy of the weights; 1 for a whole copy on each. Divides the model's heads, kv heads, ffn
    and vocabulary."""


class ReplayConfig(Config):
    """What the trainer computes as the sampler did, so that both have one distribution. The ids that `rollout.top_k`
    leaves and the experts of a mixture always are."""

    cache: bool = False
    """Whether the trainer rounds keys and values as `rollout.cache_dtype` says; gradients are those of values that are
    not rounded."""


class RolloutConfig(Config):
    """How a policy samples completions. Only settings that the loss mirrors: it needs the distribution sampled from."""

    engine: Literal["tunix", "vllm"] = "tunix"
    """Who samples: `tunix`, an engine in this process on the devices of the policy; `vllm`, the servers that `servers`
    names, of vLLM (https://docs.vllm.ai) or `tunix serve`. vLLM computes with other kernels, so that the difference to
    the trainer is larger; it is measured at every step, and corrected for: `algorithm.correction` is `truncate` by
    default there."""
    servers: tuple[str, ...] = ()
    """Addresses of the servers, such as [http://host:8000]; all of them have to serve the model of this run. Requests
    are spread over them, and those of one that dies are sent to the others."""
    weights_folder: Place | None = None
    """Where weights are written for the servers to load, in a folder that they see under the same path; null: `weights`
    in the run folder."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which a server has to answer a request or load weights; one that does not is asked no more."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in the sampler and in the loss."""
    top_k: Annotated[int, Field(ge=0, le=64)] = 0
    """How many of the most likely ids can be sampled, such as 40, at most 64; 0: all. The ids that each token was drawn
    from are kept, and in training its log-probs, those of the reference and the entropy are over the same ids, so that
    the ratio of trainer and sampler is 1 (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, sec. 3.1)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the most likely ids that can be sampled, such as 0.95, after `top_k`, without which it is
    refused; 1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability of an id as a share of the most likely one's, such as 0.05, after the others; only with
    `top_k`. 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the model's stop tokens."""
    slots: Positive | None = None
    """Completions that are sampled at a time; null: as many as there is room for. Never changes a result."""
    memory: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a device's memory that weights, the state of training and the sampler's keys and values may take. Where
    the device does not say how much it has, as on a CPU, slots take what they need."""
    cache_dtype: CacheType | None = None
    """What the sampler's keys and values are kept in; null: the model's dtype. int8 has a scale for each token and kv
    head, fp8 is e4m3: half of bfloat16's memory, and log-probs that differ more from the trainer's, which rounds none
    without `replay.cache`. Where a platform cannot read it in its place it is refused."""
    replay: ReplayConfig = ReplayConfig()
    """What else of the sampler's computation the trainer repeats."""
    speculate: Annotated[int, Field(ge=0, le=7)] = 0
    """Next tokens that are guessed at each step and checked in one pass; 0: none. Guessed by the model's own head with
    `model.mtp`, else from what followed the same tokens in the prompt and in its other completions. It changes no
    sample, and saves time where guesses are right and the device is not full, such as few long completions."""
    mesh: RolloutMeshConfig | Literal["auto"] = "auto"
    """How the devices are used to sample; auto: as few to a copy of the weights as have room for it."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """How many groups a step begins for each that it trains on, such as 1.2: sampling ends when enough are complete,
    and the others are continued in the next step. Which are first depends on `slots`, `memory`, `mesh`, and how many
    processes there are."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Steps that the weights which sampled a completion's first token may be older than those that learn from it. 0:
    sampling and learning take turns. From 1 on the next steps are sampled meanwhile, on `mesh.devices` of their own
    (of one process) or on `servers`. With `oversample` a step that has enough groups does not wait for its longest
    completions, which go on in the next one, as long as the bound allows."""
    in_flight: Literal["finish", "continue"] | None = None
    """What completions do whose weights are replaced while they are sampled: `finish` under the old ones, or `continue`
    under the new ones, so that each token has a version. Null: finish. Only with `max_staleness`."""
    mismatch_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference between the trainer's and the sampler's log-prob of a token; beyond it the run stops. Null:
    1e-3 in float32, 0.25 in bfloat16 and where `quantization` rounds activations, 1.0 with an int8 or fp8 cache that
    is not replayed: rounding alone causes some. With `engine: vllm` 0.01 in float32 and 2 in bfloat16."""
    environment: EnvironmentConfig | None = None
    """The environment that answers the model between its turns; null for single-turn completions."""
    history: History = "append"
    """What the model reads of the earlier turns of an environment: `append`, all that it has read and written, token
    for token; `template`, what its chat template shows of the conversation at each turn, as where it is deployed. Many
    leave earlier thoughts out: such a turn begins another transcript of the episode, in which only what is sampled
    anew is trained. All transcripts together have `data.max_length` tokens. The environment has to speak in messages.
    """
    stop_after_failures: Positive | None = None
    """Ends the run when so many episodes of `environment` in a row have failed, with the reason of the last, such as 32
    where it is a server that may die. Counting begins anew where a run is resumed. Null: a run ends where all episodes
    of a step have failed."""

    gone: ClassVar[Mapping[str, str]] = {"samples": "logging.samples says what is recorded, as in {groups: 4}"}

    @property
    def devices(self) -> RolloutMeshConfig | None:
        """How the devices are divided; None for auto."""
        return None if self.mesh == "auto" else self.mesh

    def spare(self, prompts: int) -> int:
        """Prompts that a step of so many begins beyond them, e.g. 7 of 32 with an oversample of 1.2."""
        return math.ceil(round(self.oversample * prompts, 6)) - prompts

    @field_validator("servers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no address of a server; write one as http://host:8000")
            if parts.username or parts.password or parts.query or parts.fragment:
                raise ValueError(f"{url!r}: an address is a scheme, a host and a port, and no more")
        addresses = tuple(url.rstrip("/") for url in value)
        if twice := next((url for url in addresses if addresses.count(url) > 1), None):
            raise ValueError(f"{twice} is named twice")
        return addresses

    @model_validator(mode="after")
    def _of_engine(self) -> "RolloutConfig":
        """Refuses settings that the chosen engine does not read."""
        of_tunix = ("slots", "memory", "cache_dtype", "speculate", "mesh", "oversample")
        of_vllm = ("servers", "weights_folder", "timeout")
        ignored = self.changed(of_tunix if self.engine == "vllm" else of_vllm)
        if ignored and self.engine == "vllm":
            raise ValueError(
                f"{', '.join(ignored)}: read by tunix's own engine, and of no effect with engine: vllm, whose servers "
                "have settings of their own; leave out"
            )
        if ignored:
            raise ValueError(f"{', '.join(ignored)}: of no effect without engine: vllm; set it, or leave out")
        if self.engine == "vllm" and not self.servers:
            raise ValueError("engine: vllm samples on servers: name them, as in servers: [http://host:8000]")
        return self

    @model_validator(mode="after")
    def _of_several_steps(self) -> "RolloutConfig":
        """Refuses settings of asynchronous sampling and of oversampling that do not go together."""
        agent = {
            "max_staleness": self.max_staleness,
            "engine: vllm": self.engine == "vllm",
            "oversample": self.oversample > 1,
        }
        if self.environment is not None and self.environment.agent and any(agent.values()):
            ignored = next(key for key, is_set in agent.items() if is_set)
            raise ValueError(
                f"{ignored}: an agent asks the engine of this process, for the weights of its step; leave it out"
            )
        if self.history == "template" and (self.environment is None or self.environment.agent):
            why = "an agent's requests are" if self.environment else "without an environment a completion is"
            raise ValueError(f"history: template changes nothing: {why} always what the template shows; leave it out")
        if self.in_flight is not None and not self.max_staleness:
            raise ValueError(f"in_flight: {self.in_flight} changes nothing without max_staleness; leave it out")
        if self.in_flight == "continue" and self.environment is not None:
            raise ValueError(
                "in_flight: continue pauses completions for new weights, and no environment's episode is paused for "
                "them: set it to finish, or leave environment out"
            )
        if self.stop_after_failures is not None and self.environment is None:
            raise ValueError(
                f"stop_after_failures: {self.stop_after_failures} counts episodes of an environment, and none is set: "
                "leave it out"
            )
        if self.max_staleness and self.oversample > 1:
            if self.max_staleness < 2:
                raise ValueError(
                    f"oversample: {self.oversample:g} carries completions over to the next step, where their weights "
                    "are a step older: set max_staleness to 2 or more, or leave one of them out"
                )
            if self.oversample > 2:
                raise ValueError(
                    f"oversample: {self.oversample:g} may carry over more groups than a step takes, whose age "
                    "max_staleness bounds: set it to 2 or less"
                )
        return self

    @model_validator(mode="after")
    def _replayed(self) -> "RolloutConfig":
        """Refuses truncated sampling that the loss cannot replay."""
        cuts = self.changed(("top_k", "top_p", "min_p"))
        if cuts and self.environment is not None and self.environment.agent:
            raise ValueError(
                f"{cuts[0]}: of no effect on an agent, whose requests have settings of their own; leave out"
            )
        if cuts and not self.top_k:
            raise ValueError(
                f"{cuts[0]}: {getattr(self, cuts[0]):g} leaves any number of ids, and all those that a token is drawn "
                "from are kept for the loss: set top_k as well, such as 64"
            )
        if self.replay.cache and self.cache_dtype is None:
            raise ValueError("replay.cache: of no effect without cache_dtype, such as int8; set it, or leave out")
        return self


HARNESS = "lm-eval:"
"""How the `data` of a task begins that lm-eval measures."""


class EvalTask(Config):
    """A task of `eval.tasks`: prompts that are answered and scored at every evaluation, in addition to `data.eval`."""

    name: str
    """What its metrics begin with, `eval/NAME/reward`, and what its rows of samples.jsonl are called."""
    environment: EnvironmentConfig | None = None
    """What answers the model, as in `rollout.environment`. A task that sets neither this nor `reward` has the run's."""
    reward: RewardConfig | None = None
    """What scores the answers, as in the section `reward`; null: the environment does."""
    data: Place | None = None
    """Its rows, in the notation of `data.train`. Null: episodes of an environment that makes its own, with a seed that
    is not trained on; without such an environment the rows of `data.eval`. `lm-eval:FILE` is a task of that harness,
    which says everything else but `n`: metrics `eval/NAME/acc` and so on."""
    columns: dict[str, str] = {}
    """Our column name -> that of its rows, as in `data.columns`."""
    n: Positive = 64
    """Prompts: rows from the start."""
    pass_at: tuple[Positive, ...] = ()
    """Values k of pass@k, the chance that one of k answers is right, such as [1, 8]: without bias, from as many answers
    to each prompt as the largest. Metrics `eval/NAME/pass@8`."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """That of the answers; 0 is greedy. Null: a greedy answer to each prompt for the reward, and for pass@k with a k
    above 1 others, at `rollout.temperature`."""
    success: float = 1.0
    """Least reward of a right answer, for pass@k."""

    @model_validator(mode="after")
    def _effective(self) -> "EvalTask":
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII) or self.name in ("loss", "reward", "rewards"):
            raise ValueError(
                f"name: {self.name!r} names no task: letters, digits, ., - and _ do, but not loss, reward and rewards, "
                "which the evaluation of data.eval has"
            )
        if (most := max(self.pass_at, default=1)) > 1 and self.temperature == 0:
            raise ValueError(f"pass_at {most}: greedy answers to a prompt are all alike; leave temperature: 0 out")
        if self.success != 1 and not self.pass_at:
            raise ValueError("success changes nothing without pass_at, whose right answers it is about")
        if self.columns and self.data is None:
            raise ValueError("columns changes nothing without data, whose columns it is about")
        idle = self.changed(key for key in EvalTask.model_fields if key not in ("name", "data", "n"))
        if self.harness_task and idle:
            raise ValueError(f"{idle[0]} changes nothing for a task of lm-eval, whose file says how it is measured")
        return self

    @property
    def harness_task(self) -> str | None:
        """The file, or the name, of a task of lm-eval; None for a task of prompts and rewards."""
        return self.data.removeprefix(HARNESS) if self.data and self.data.startswith(HARNESS) else None

    @property
    def metrics(self) -> list[str]:
        """Names of its metrics, e.g. `["eval/arith/reward", "eval/arith/pass@8"]`; none that only its file says."""
        if self.harness_task:
            return []
        return [f"eval/{self.name}/{key}" for key in ("reward", *(f"pass@{k}" for k in self.pass_at))]

    def in_run(self, environment: EnvironmentConfig | None, reward: RewardConfig | None) -> "EvalTask":
        """The task with the run's environment and rewards where it sets neither."""
        if self.environment is not None or self.reward is not None:
            return self
        return self.model_copy(update={"environment": environment, "reward": reward})

    def data_in_run(self, data: DataConfig) -> DataConfig:
        """The `data` section whose held-out rows are those of the task, after `in_run`."""
        spec = self.data or (EPISODES if self.environment and self.environment.package else None)
        rows = {"eval": spec, "eval_split": None, "format": "auto", "columns": self.columns}
        return data.model_copy(update=rows if spec else {})


class EvalConfig(Config):
    """Evaluation while training, on `data.eval` and on tasks; a list alone is that of the tasks."""

    every: Positive = 50
    """Steps between evaluations; the last step is always evaluated."""
    rows: Positive = 256
    """Rows of `data.eval` that are read, from its start."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Number of greedy completions of held-out prompts that are shown and saved before and after training."""
    sample_tokens: Positive = 48
    """Tokens of such a completion at most."""
    tasks: tuple[EvalTask, ...] = ()
    """Further prompts that are answered and scored, each task under its name, with standard errors
    (`eval/NAME/reward_se`); all answers are written to samples.jsonl."""
    until: dict[str, float] = {}
    """Ends the run as soon as an evaluation reaches one of these, such as {eval/reward: 0.9}, {eval/loss: 1.5} or
    {eval/NAME/pass@8: 0.5}."""

    @model_validator(mode="before")
    @classmethod
    def _of_tasks(cls, value: Any) -> Any:
        return {"tasks": value} if isinstance(value, list | tuple) else value

    @field_validator("tasks")
    @classmethod
    def _distinct(cls, value: tuple[EvalTask, ...]) -> tuple[EvalTask, ...]:
        names = [task.name for task in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tasks are called {twice!r}: give one of them another name")
        return value

    @field_validator("until")
    @classmethod
    def _known(cls, value: dict[str, float], info: Any) -> dict[str, float]:
        # Tasks that are wrong themselves are reported, and are not there.
        known = [name for task in info.data.get("tasks", ()) for name in task.metrics]
        others = [f"eval/{task.name}/" for task in info.data.get("tasks", ()) if task.harness_task]
        for name in value if "tasks" in info.data else ():
            starts = ("eval/loss/", "eval/reward/", "eval/rewards/", *others)
            if name not in known and not f"{name}/".startswith(starts):
                hint, tasks = nearest(name, known), "".join(f", {metric}" for metric in known)
                raise ValueError(
                    f"{name!r} is no metric of an evaluation: eval/loss, or eval/reward and eval/reward/NAME{tasks}"
                    f"{hint and '.'}{hint}"
                )
        return value
