"""The section `buffer` of a config: tasks, experiences, and which of them train.

Owns: `BufferConfig` and what is in it. Does not own: rules that concern other sections too (`trinity_tasks.config`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engines.config import Frozen, Resume
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.operator_params import OperatorConfig
from trinity_tasks.selectors import SelectorConfig


class TasksetConfig(Frozen):
    """Procedurally generated or stored tasks with a verifier."""

    name: Annotated[str, Resume.FORK] = "taskset"
    """Name in metrics: eval/<name>/accuracy."""
    source: Annotated[Literal["reasoning_gym", "jsonl"], Resume.FORK] = "reasoning_gym"
    """Where tasks come from."""
    dataset: Annotated[str, Resume.FORK] = ""
    """reasoning_gym: data set name. jsonl: path or URL of a file with `question` and `answer` on each line."""
    dataset_args: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Arguments of the reasoning_gym data set."""
    split: Annotated[Literal["train", "held_out"], Resume.FORK] = "train"
    """Tasks are split by a hash of the question, so that the two splits share none."""
    held_out_share: Annotated[float, Resume.FORK] = Field(default=0.1, ge=0, lt=1)
    """Share of all questions that belongs to the held-out split. The same in both splits of one source."""
    seed: Annotated[int, Resume.FORK] = 42
    """Seed of the generator."""
    num_tasks: Annotated[int | None, Resume.FORK] = Field(default=None, ge=1)
    """How many distinct tasks. None: without end."""
    repeat_times: Annotated[int, Resume.FORK] = Field(default=1, ge=1)
    """Evaluation: samples per task."""
    system_prompt: Annotated[str | None, Resume.FORK] = None
    """System message before each question."""
    reward_fn: Annotated[str, Resume.FORK] = "verifier_exact"
    """verifier_exact (1 or 0), verifier (the score), or a function of yours as module:name."""


class ExplorerInput(Frozen):
    """Tasks to learn from, and tasks to measure on."""

    taskset: TasksetConfig | None = None
    """Tasks that produce experiences."""
    eval_tasksets: Annotated[tuple[TasksetConfig, ...], Resume.SAFE] = ()
    """Tasks never trained on. Give a set that changes another name, so that its accuracies stay comparable."""
    default_workflow_type: Annotated[Literal["sample", "demonstrate"], Resume.FORK] = "sample"
    """sample: the model answers and is scored. demonstrate: the task's own answer is an expert experience (sft)."""
    expert_taskset: TasksetConfig | None = None
    """Tasks whose own answers are mixed in as expert experiences (mix, mix_chord)."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [taskset.name for taskset in self.eval_tasksets]
        if len(set(names)) < len(names):
            raise ValueError(f"two eval_tasksets have the same name: {names}; their accuracies would be one metric")
        return self


class ReplayConfig(Frozen):
    """Priority of a group: version of the weights that sampled it - decay x uses + sigma x N(0, 1)."""

    decay: Annotated[float, Resume.FORK] = Field(default=2.0, ge=0)
    """What each use costs, in versions."""
    use_count_limit: Annotated[int | None, Resume.FORK] = Field(default=3, ge=1)
    """How often a group trains at most. None: without end, so that a trainer never waits for new groups."""
    sigma: Annotated[float, Resume.FORK] = Field(default=0.0, ge=0)
    """Standard deviation of the noise, in versions."""
    reuse_cooldown_steps: Annotated[int, Resume.FORK] = Field(default=0, ge=0)
    """Train steps that a group rests after each use."""


class ExperienceBufferConfig(Frozen):
    """Where experiences lie, and how long to wait for them."""

    name: Annotated[str, Resume.FORK] = "main"
    """Folder under experiences/."""
    max_read_timeout: Annotated[float, Resume.SAFE] = Field(default=1800.0, gt=0)
    """Longest wait for a batch, seconds; then the trainer is starved."""
    sample_strategy: Annotated[Literal["fifo", "newest", "priority", "epochs"], Resume.FORK] = "fifo"
    """fifo: oldest first. newest: sampled by the newest weights first. priority: replay, see replay_buffer. epochs:
    data that has ended, again and again, in the order of data_selector."""
    max_staleness: Annotated[int | None, Resume.FORK] = Field(default=None, ge=0)
    """fifo, newest, priority: train steps between the weights that sampled a row and those that it trains; a group with
    an older row is left out. None: any."""
    capacity: Annotated[int, Resume.FORK] = Field(default=1024, ge=1)
    """newest, priority: groups that wait at most; the lowest leave first."""
    replay_buffer: ReplayConfig = ReplayConfig()
    """priority: what comes first, and how often."""
    data_selector: SelectorConfig = SelectorConfig()
    """epochs: which groups come next."""
    total_epochs: Annotated[int | None, Resume.SAFE] = Field(default=None, ge=1)
    """epochs: the data ends after so many. None: only trainer.total_steps ends the training."""
    data: OfflineConfig | None = None
    """Data that exists already: it is imported before the training, as the only writer of this buffer."""
    max_damaged_shards: Annotated[int, Resume.SAFE] = Field(default=10, ge=0)
    """Shards that cannot be read, and are noted and left out; one more ends the run."""

    @model_validator(mode="after")
    def _fits_strategy(self) -> Self:
        takes: dict[str, tuple[str, ...]] = {
            "max_staleness": ("fifo", "newest", "priority"),
            "capacity": ("newest", "priority"),
            "replay_buffer": ("priority",),
            "data_selector": ("epochs",),
            "total_epochs": ("epochs",),
        }
        for field, strategies in takes.items():
            is_set = getattr(self, field) != type(self).model_fields[field].get_default()
            if is_set and self.sample_strategy not in strategies:
                raise ValueError(
                    f"{field} has no effect with sample_strategy: {self.sample_strategy}; it is for "
                    f"{', '.join(strategies)}"
                )
        return self


class TrainerInput(Frozen):
    """What the trainer reads."""

    experience_buffer: ExperienceBufferConfig = ExperienceBufferConfig()
    """The main buffer."""
    expert_buffer: ExperienceBufferConfig = ExperienceBufferConfig(name="experts")
    """Expert experiences, for algorithms that mix them in."""
    expert_data_ratio: Annotated[float, Resume.FORK] = Field(default=0.5, gt=0, lt=1)
    """Share of a batch that is the expert's, if the algorithm mixes them in."""
    last_batch: Annotated[Literal["train", "drop"], Resume.FORK] = "train"
    """What becomes of fewer experiences than a batch at the end of the data."""
    remove_consumed_shards: Annotated[bool, Resume.SAFE] = False
    """Remove shards that no checkpoint can need any more; the ledger still names their rows. It needs
    trainer.max_checkpoints_to_keep."""

    @model_validator(mode="after")
    def _two_buffers(self) -> Self:
        if self.experience_buffer.name == self.expert_buffer.name:
            raise ValueError(
                f"experience_buffer and expert_buffer have the same name, {self.expert_buffer.name!r}: one row cannot "
                "be both"
            )
        return self


class BufferConfig(Frozen):
    """Batches of tasks and of experiences."""

    batch_size: Annotated[int, Resume.FORK] = Field(default=1, ge=1)
    """Tasks per explorer step."""
    train_batch_size: Annotated[int, Resume.FORK] = Field(default=0, ge=0)
    """Experiences per train step, an expert's included. 0: batch_size x group size, with the expert's beside them."""
    operators: tuple[OperatorConfig, ...] = ()
    """What happens to sampled experiences before they are written, in this order: filters, shaping, your own."""
    explorer_input: ExplorerInput = ExplorerInput()
    """Tasks."""
    trainer_input: TrainerInput = TrainerInput()
    """Experiences."""
