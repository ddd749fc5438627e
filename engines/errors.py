"""Every error a user can meet, one class per thing that can be wrong.

A message says what happened, where, why, and what to do. All are picklable: they cross process and Prefect boundaries.
"""


class TrinityFlowsError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(TrinityFlowsError, ValueError):
    """The configuration is wrong: nothing was started."""


class DataError(TrinityFlowsError, ValueError):
    """An experience, a task or a shard is not what it must be; the row or object is named."""


class CheckpointError(TrinityFlowsError, RuntimeError):
    """A checkpoint is damaged, missing, or cannot be written."""


class EngineError(TrinityFlowsError, RuntimeError):
    """The training engine cannot go on. The caller must prepare it again before the next step."""


class StorageError(TrinityFlowsError, OSError):
    """The store cannot be read or written: wrong bucket, no permission, full, or gone."""


class StarvedError(TrinityFlowsError, TimeoutError):
    """The trainer waited for experiences and not enough came; the message counts available, filtered and needed."""


class LeaseLost(TrinityFlowsError, RuntimeError):
    """Another process owns this job, or has taken it over; nothing more is written."""
