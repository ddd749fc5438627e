"""The whole configuration of a job: `Config`. Frozen, complete, torch-free; validation is pure.

Owns: the sections that are not the engine's, cross-field rules, derived values. Reading files and `--set`, and what a
resume may change, are in `config_source.py`. Key names are those of Trinity-RFT wherever the meaning is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from engines.algorithms.presets import resolve
from engines.algorithms.spec import Algorithm
from engines.config import AlgorithmConfig, EngineConfig, Frozen, ModelConfig, Resume
from engines.errors import ConfigError
from trinity_tasks.buffer_config import BufferConfig


class StopWhen(Frozen):
    """A target: training ends after the first step that measures it."""

    metric: Annotated[str, Resume.SAFE]
    """Metric of a train step, as MLflow shows it: loss/total, data/reward_mean, ..."""
    below: Annotated[float | None, Resume.SAFE] = None
    """Reached when the metric is lower than this."""
    above: Annotated[float | None, Resume.SAFE] = None
    """Reached when the metric is higher than this."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.below is None) == (self.above is None):
            raise ValueError("stop_when needs one bound: below or above")
        return self

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step that measured this has reached the target. NaN and a metric that is not there have not."""
        value = metrics.get(self.metric, math.nan)
        return value < self.below if self.below is not None else value > cast("float", self.above)


class TrainerConfig(Frozen):
    """How long to train, when to save, and with which engine."""

    name: Annotated[str, Resume.FORK] = "trainer"
    """Name in logs."""
    trainer_type: Annotated[str, Resume.FORK] = "hf"
    """Engine: hf, one of the entry point group trinity_flows.engines, or module:Class."""
    total_steps: Annotated[int | None, Resume.SAFE] = Field(default=None, ge=1)
    """Train steps in all. None: until the data ends."""
    stop_when: Annotated[StopWhen | None, Resume.SAFE] = None
    """A target that ends the training before total_steps."""
    save_interval: Annotated[int, Resume.SAFE] = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0: only at the end. The end is always saved."""
    save_hf_checkpoint: Annotated[Literal["last", "always", "never"], Resume.SAFE] = "last"
    """When the checkpoint's HF folder is a full export, tokenizer included."""
    max_checkpoints_to_keep: Annotated[int, Resume.SAFE] = Field(default=0, ge=0)
    """Older checkpoints are removed; 0: keep all."""
    max_token_len_per_gpu: Annotated[int, Resume.FORK] = Field(default=2048, ge=1)
    """Token budget of a micro-batch."""
    max_nonfinite_steps: Annotated[int, Resume.SAFE] = Field(default=3, ge=1)
    """Consecutive updates skipped for a non-finite loss or gradient before the run fails."""
    critic_warmup: Annotated[int, Resume.FORK] = Field(default=0, ge=0)
    """Train steps in which only the critic learns; without a critic it has no effect."""
    num_threads: Annotated[int | None, Resume.FORK] = Field(default=None, ge=1)
    """torch threads within an operation. None: torch's choice."""


class ExplorerConfig(Frozen):
    """Sampling and evaluation."""

    name: Annotated[str, Resume.FORK] = "explorer"
    """Name of the writer of the experience shards."""
    eval_interval: Annotated[int, Resume.SAFE] = Field(default=0, ge=0)
    """Evaluate every so many train steps; 0: only at the start and the end."""
    eval_on_startup: Annotated[bool, Resume.SAFE] = True
    """Evaluate before the first step."""


class SynchronizerConfig(Frozen):
    """How trained weights reach the samplers."""

    sync_method: Annotated[Literal["memory", "checkpoint", "nccl"], Resume.SAFE] = "memory"
    """memory: within the process. checkpoint: published on storage. nccl: broadcast by the engine."""
    sync_style: Annotated[Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"], Resume.SAFE] = "fixed"
    """Who decides when: fixed, trainer_driven and fully_async every sync_interval; explorer_driven on demand."""
    sync_interval: Annotated[int, Resume.FORK] = Field(default=1, ge=1)
    """Train steps between transfers."""
    sync_timeout: Annotated[float, Resume.SAFE] = Field(default=3600.0, gt=0)
    """Longest wait for the other side, seconds."""


class MonitorConfig(Frozen):
    """Metrics."""

    monitor_type: Annotated[Literal["mlflow"], Resume.SAFE] = "mlflow"
    """MLflow."""
    tracking_uri: Annotated[str | None, Resume.SAFE] = None
    """MLflow server or store. None: MLFLOW_TRACKING_URI, else a sqlite file in checkpoint_root_dir."""
    experiment: Annotated[str | None, Resume.SAFE] = None
    """MLflow experiment. None: the project."""


class StorageConfig(Frozen):
    """What may be assumed of the store under checkpoint_root_dir."""

    single_writer: Annotated[bool, Resume.SAFE] = False
    """You promise that only one process at a time writes this job. Needed for a store that ignores create-only writes
    (If-None-Match), where two runs of one job that begin at once could overwrite each other's checkpoints."""


class LeaseConfig(Frozen):
    """One writer per job."""

    ttl_s: Annotated[float, Resume.SAFE] = Field(default=60.0, ge=2)
    """A holder on another machine that was silent for so long has lost the job, seconds."""


class StageConfig(Frozen):
    """One stage of a run: what differs from the sections above it. Merged deeply: it changes only what it names."""

    stage_name: Annotated[str, Resume.FORK] = Field(min_length=1)
    """Folder and run name of the stage."""
    model: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `model`. From the second stage on, the model is the previous stage's last checkpoint."""
    algorithm: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `algorithm`."""
    buffer: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `buffer`."""
    trainer: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `trainer`."""
    explorer: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `explorer`."""
    synchronizer: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Differences in `synchronizer`."""


class Config(Frozen):
    """A whole job.

    Example:
        >>> Config.model_validate({"model": {"model_path": "m"}, "mode": "train"}).job_path
        'trinity-flows/rft'
    """

    mode: Annotated[Literal["both", "train"], Resume.FORK] = "both"
    """both: explore and train in one process, in turns. train: experiences are written by others."""
    project: Annotated[str, Resume.FORBIDDEN] = "trinity-flows"
    """First folder of the job, and the MLflow experiment."""
    group: Annotated[str, Resume.FORBIDDEN] = ""
    """Second folder of the job; may be empty."""
    name: Annotated[str, Resume.FORBIDDEN] = Field(default="rft", min_length=1)
    """Third folder of the job. Running the same name again resumes it."""
    checkpoint_root_dir: Annotated[str, Resume.SAFE] = Field(default="runs", min_length=1)
    """Folder or URL (file://, s3://, gs://, memory://) under which jobs lie. A job's folder may be moved to another."""
    seed: Annotated[int, Resume.FORK] = Field(default=42, ge=0, lt=2**63)
    """Seed of initial weights, sampling and data order."""
    model: ModelConfig
    """The model."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm."""
    buffer: BufferConfig = BufferConfig()
    """Tasks and experiences."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""
    explorer: ExplorerConfig = ExplorerConfig()
    """The explorer."""
    synchronizer: SynchronizerConfig = SynchronizerConfig()
    """Weight transfer."""
    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go."""
    storage: StorageConfig = StorageConfig()
    """The store of the job."""
    lease: LeaseConfig = LeaseConfig()
    """Who may write."""
    stages: tuple[StageConfig, ...] = ()
    """Stages run one after another, each a job of its own under this one's folder."""

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for field in ("project", "group", "name"):
            if {"..", "."} & set(getattr(self, field).split("/")) or getattr(self, field).startswith("/"):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be a relative folder name without dots")
        if self.stages:
            names = [stage.stage_name for stage in self.stages]
            if len(set(names)) < len(names):
                raise ValueError(f"stages have the same stage_name: {names}")
            for stage in self.stages:
                self._check_stage(stage.stage_name)
            return self
        algorithm = resolve(self.algorithm)
        num_rows, num_experts = self.train_batch_size, self.expert_batch_size
        if (num_rows - num_experts) % algorithm.group_size or num_rows == num_experts:
            experts = f" less {num_experts} of experts" if num_experts else ""
            raise ValueError(
                f"buffer.train_batch_size = {num_rows}{experts} does not hold whole groups of "
                f"algorithm.repeat_times = {algorithm.group_size}; make it a multiple"
            )
        self._check_buffers(algorithm)
        if self.mode == "both":
            self._check_exploring(algorithm)
        warmup, total = self.trainer.critic_warmup, self.trainer.total_steps
        if "values" in algorithm.needs and total is not None and warmup >= total:
            raise ValueError(
                f"trainer.critic_warmup = {warmup} leaves none of {total} total_steps to train the policy; lower it"
            )
        if algorithm.shaping is not None and self.model.max_response_tokens is None:
            raise ValueError("algorithm.overlong_shaping needs model.max_response_tokens: how long is too long")
        needs_end = self.algorithm.optimizer.lr_scheduler_type != "constant"
        if self.trainer.total_steps is None and (needs_end or self.mode == "both"):
            raise ValueError("trainer.total_steps is needed by mode: both and by schedules that decay")
        if self.mode == "both" and self.synchronizer.sync_method == "nccl":
            raise ValueError(
                "synchronizer.sync_method: nccl needs samplers in other processes; in mode: both use memory"
            )
        return self

    def _check_buffers(self, algorithm: Algorithm) -> None:
        """What is read must fit the algorithm, and a pool must hold a batch."""
        main, experts = self.buffer.trainer_input.experience_buffer, self.buffer.trainer_input.expert_buffer
        if self.mode == "both" and main.data is not None:
            raise ValueError(
                "mode: both samples the experiences that train; to train on those of "
                "buffer.trainer_input.experience_buffer.data use mode: train"
            )
        for name, data in (("experience_buffer", main.data), ("expert_buffer", experts.data)):
            wanted = "dpo" if "pairs" in algorithm.needs else "sft"
            if data is not None and data.format != "trinity" and (data.schema_type == "dpo") != (wanted == "dpo"):
                raise ValueError(
                    f"{self.algorithm.algorithm_type} cannot train on {name}.data.schema_type: {data.schema_type}; set "
                    f"it to {wanted}"
                )
        num_groups = (self.train_batch_size - self.expert_batch_size) // algorithm.group_size
        if main.sample_strategy in ("newest", "priority") and main.capacity < num_groups:
            raise ValueError(
                f"buffer.trainer_input.experience_buffer.capacity = {main.capacity} groups is less than a batch has, "
                f"{num_groups}: no batch would ever be whole; raise it"
            )
        if self.buffer.trainer_input.remove_consumed_shards:
            if not self.trainer.max_checkpoints_to_keep:
                raise ValueError(
                    "remove_consumed_shards removes what no checkpoint can need, and trainer.max_checkpoints_to_keep = "
                    "0 keeps them all: set it, or nothing is ever removed"
                )
            if "epochs" in (main.sample_strategy, experts.sample_strategy):
                raise ValueError("sample_strategy: epochs needs all data again; leave remove_consumed_shards out")
        if main.sample_strategy == "epochs" and self.mode == "both":
            raise ValueError("sample_strategy: epochs needs data that has ended; use mode: train")

    def _check_exploring(self, algorithm: Algorithm) -> None:
        tasks, buffers, needs = self.buffer.explorer_input, self.buffer.trainer_input, algorithm.needs
        if tasks.taskset is None:
            raise ValueError(
                "mode: both needs buffer.explorer_input.taskset; mode: train reads a buffer that others fill"
            )
        name = self.algorithm.algorithm_type
        if algorithm.group_size == 1 and algorithm.advantage is not None and algorithm.advantage.compares_samples:
            raise ValueError(
                f"{name} compares the samples of a task, and algorithm.repeat_times = 1 leaves nothing to compare: "
                "every advantage would be 0; raise it"
            )
        if "pairs" in needs:
            raise ValueError(
                f"{name} trains on pairs of a preferred and a refused response, and the explorer writes none; use "
                "mode: train, and write them with ExperienceWriter"
            )
        if "rewards" in needs and tasks.default_workflow_type == "demonstrate":
            raise ValueError(
                f"{name} needs rewards, and default_workflow_type: demonstrate gives none; set it to sample, or use sft"
            )
        imitates = algorithm.advantage is None and not {"rewards", "teacher_logprobs"} & needs
        if imitates and tasks.default_workflow_type == "sample":
            raise ValueError(
                f"{name} imitates the answers that it is given, and default_workflow_type: sample gives it the model's "
                "own; set buffer.explorer_input.default_workflow_type: demonstrate, which gives the tasks' answers"
            )
        if "teacher_logprobs" in needs and self.model.teacher_model_path is None:
            raise ValueError(f"{name} needs a teacher; set model.teacher_model_path")
        if "expert_rows" in needs and (tasks.expert_taskset is None) == (buffers.expert_buffer.data is None):
            raise ValueError(
                f"{name} mixes in an expert's experiences; set buffer.explorer_input.expert_taskset: tasks "
                "whose own answers are the expert's, or buffer.trainer_input.expert_buffer.data; one of both"
            )

    def _check_stage(self, stage_name: str) -> None:
        """Raises ValidationError whose locations begin with the stage."""
        try:
            self.stage(stage_name)
        except ValidationError as error:
            faults = [
                InitErrorDetails(
                    type=fault["type"],
                    loc=("stages", stage_name, *fault["loc"]),
                    input=fault["input"],
                    ctx=fault.get("ctx", {}),
                )
                for fault in error.errors(include_url=False)
            ]
            raise ValidationError.from_exception_data(error.title, faults) from error

    @property
    def group_size(self) -> int:
        """Samples per task."""
        return resolve(self.algorithm).group_size

    @property
    def train_batch_size(self) -> int:
        """Experiences per train step, those of experts included."""
        if self.buffer.train_batch_size:
            return self.buffer.train_batch_size
        return self.buffer.batch_size * self.group_size + self.expert_batch_size

    @property
    def expert_batch_size(self) -> int:
        """Expert experiences per train step; 0 unless the algorithm mixes them in."""
        if "expert_rows" not in resolve(self.algorithm).needs:
            return 0
        share, size = self.buffer.trainer_input.expert_data_ratio, self.buffer.train_batch_size
        if size:
            return math.ceil(share * size)
        return round(self.buffer.batch_size * self.group_size * share / (1 - share))

    @property
    def job_path(self) -> str:
        """project/group/name, empty parts skipped."""
        return "/".join(part for part in (self.project, self.group, self.name) if part)

    @property
    def engine(self) -> EngineConfig:
        """What the engine is told."""
        return EngineConfig(
            trainer_type=self.trainer.trainer_type,
            model=self.model,
            algorithm=self.algorithm,
            total_steps=self.trainer.total_steps,
            critic_warmup=self.trainer.critic_warmup,
            max_token_len_per_gpu=self.trainer.max_token_len_per_gpu,
            max_nonfinite_steps=self.trainer.max_nonfinite_steps,
            num_threads=self.trainer.num_threads,
            seed=self.seed,
        )

    def require_one_job(self, command: str) -> None:
        """Raises ConfigError if there are stages: `command` runs one job, and would leave them out without a word."""
        if self.stages:
            names = ", ".join(stage.stage_name for stage in self.stages)
            raise ConfigError(
                f"{command} runs one job, and this config has stages ({names}): run them with finetune, or leave "
                "`stages` out of the config"
            )

    def stage(self, stage_name: str, model_path: str | None = None) -> Config:
        """The complete config of one stage: this one with the stage's differences, named <name>/<stage_name>.

        `model_path` replaces the model's source (the previous stage's checkpoint); limits and sampling stay.
        """
        stage = next(stage for stage in self.stages if stage.stage_name == stage_name)
        merged = deep_merge(
            self.model_dump(exclude_unset=True, exclude={"stages"}),
            stage.model_dump(exclude_unset=True, exclude={"stage_name"}),
        )
        merged["name"] = f"{self.name}/{stage_name}"
        if model_path is not None:
            merged["model"] |= {"model_path": model_path, "architecture": None, "tokenizer": None}
        return Config.model_validate(merged)


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it: mappings are merged key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = deep_merge(cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value))
        merged[key] = value
    return merged
