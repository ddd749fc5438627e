"""HfEngine passes the suite that every engine must pass, for each algorithm."""

from engines.base import TrainEngineWrapper
from engines.conformance import EngineConformance
from engines.experience import Experience
from engines.registry import get_trainer_wrapper
from tests.tiny_llama import engine_config, groups


class TestGrpo(EngineConformance):
    def make_engine(self) -> TrainEngineWrapper:
        return get_trainer_wrapper(engine_config(optimizer={"lr_scheduler_type": "cosine"}))

    def batch(self, seed: int) -> list[Experience]:
        return groups(seed)


class TestGrpoRecomputedOldLogprobs(TestGrpo):
    def make_engine(self) -> TrainEngineWrapper:
        algorithm = {"bypass_old_logprobs": False, "entropy_loss_fn_args": {"entropy_coef": 0.01}}
        return get_trainer_wrapper(engine_config(algorithm, updates_per_step=2))


class TestSft(EngineConformance):
    def make_engine(self) -> TrainEngineWrapper:
        return get_trainer_wrapper(engine_config({"algorithm_type": "sft"}))

    def batch(self, seed: int) -> list[Experience]:
        return groups(seed, reward=None, logprobs=None)
