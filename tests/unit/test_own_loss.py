"""A user's own loss, advantage and filter: the example of the README trains as computed by hand; mistakes are named."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.algorithms.presets import resolve
from engines.config import AlgorithmConfig, EngineConfig
from engines.errors import ConfigError, EngineError
from engines.experience import EID, Experience
from engines.hf import model as hf_model
from engines.hf.engine import HfEngine
from tests.tiny_llama import engine_config, experience, groups
from trinity_tasks.config_source import load_config

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "infra/examples/own_loss"
BY_NAME = [
    "algorithm.policy_loss_fn=soft_clip",
    "algorithm.advantage_fn=median",
]
REWARDS = [[0.0, 1.0, 4.0], [2.0, 3.0]]
ADVANTAGES = [-2.0, 0.0, 6.0, -1.0, 1.0]
"""2 (R - median), with the scale of the example's config."""


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The module as PYTHONPATH would give it."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example built to a wheel and unpacked, which is what pip does to install it."""
    folder = tmp_path_factory.mktemp("own_loss")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def installed(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(built)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return built


def rows() -> list[Experience]:
    random = np.random.default_rng(0)
    return [
        experience(
            tokens=random.integers(5, 101, 3 + length),
            prompt_length=3,
            logprobs=random.normal(-4.6, 0.3, length),
            reward=reward,
            eid=EID(0, task, run, 0, ""),
        )
        for task, rewards in enumerate(REWARDS)
        for run, (reward, length) in enumerate(zip(rewards, (4, 2, 7), strict=False))
    ]


def trained(config: EngineConfig, exps: list[Experience], num_steps: int) -> list[tuple[dict[str, Any], float]]:
    """Weights before each step and the policy loss that the step reports."""

    async def run() -> list[tuple[dict[str, Any], float]]:
        engine, done, weights = HfEngine(config), [], {}
        engine.weights_sink = lambda version, tensors: weights.update({version: tensors})
        await engine.prepare()
        try:
            for step in range(num_steps):
                engine.upload_state_dict()
                metrics = await engine.train_step(exps)
                done.append((weights[step], metrics["loss/policy"]))
        finally:
            await engine.shutdown()
        return done

    return asyncio.run(run())


def by_hand(config: EngineConfig, weights: dict[str, Any], exps: list[Experience], width: float) -> float:
    """Mean over all response tokens of -A width tanh((lp - old) / width), from the model's own logits."""
    torch.set_num_threads(1)
    model = hf_model.load(config.model, None, config.seed).model
    model.load_state_dict(weights, strict=False)
    losses: list[float] = []
    for exp, advantage in zip(exps, ADVANTAGES, strict=True):
        assert exp.logprobs is not None
        tokens = torch.from_numpy(exp.tokens).long()
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=tokens[None]).logits[0].double(), -1)
        for position, old in zip(range(exp.prompt_length, len(tokens)), exp.logprobs.tolist(), strict=True):
            logprob = float(logs[position - 1, tokens[position]])
            losses.append(-advantage * width * np.tanh((logprob - old) / width))
    return float(np.mean(losses))


def assert_trains_as_by_hand(config: EngineConfig, width: float) -> None:
    exps = rows()
    done = trained(config, exps, 2)
    for weights, loss in done:
        assert loss == pytest.approx(by_hand(config, weights, exps, width), rel=1e-5)
    assert done[1][1] < done[0][1] - 0.01


@pytest.mark.usefixtures("on_path")
def test_by_module_and_class() -> None:
    assert_trains_as_by_hand(load_config(EXAMPLE / "config.yaml").engine, width=0.5)


@pytest.mark.usefixtures("installed")
def test_by_entry_point() -> None:
    config = load_config(EXAMPLE / "config.yaml", BY_NAME)
    assert config.algorithm.policy_loss_fn == "soft_clip"
    assert_trains_as_by_hand(config.engine, width=0.5)


@pytest.mark.usefixtures("installed")
def test_a_whole_algorithm() -> None:
    by_name, in_full = (
        resolve(AlgorithmConfig(algorithm_type=name)) for name in ("soft_median", "my_losses:ALGORITHM")
    )
    assert by_name == in_full
    assert (by_name.group_size, by_name.needs) == (8, {"rewards", "old_logprobs", "rollout_logprobs"})
    changed = resolve(AlgorithmConfig(algorithm_type="soft_median", policy_loss_fn_args={"width": 0.7}))
    assert (changed.loss.model_dump(), changed.advantage) == ({"width": 0.7}, by_name.advantage)


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_nearly_that_of_an_entry_point() -> None:
    with pytest.raises(ConfigError, match=r"policy_loss_fn = 'soft_clop' is not known; did you mean soft_clip\?"):
        resolve(AlgorithmConfig(policy_loss_fn="soft_clop"))
    with pytest.raises(ConfigError, match=r"advantage_fn = 'medians' is not known; did you mean median\?"):
        resolve(AlgorithmConfig(advantage_fn="medians"))


def test_the_readme_shows_the_example() -> None:
    section = (REPO / "README.md").read_text().partition("\n## Your own loss\n")[2].partition("\n## ")[0]
    assert section.count("\n") <= 32
    code = section.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) >= 10
    written = (EXAMPLE / "my_losses.py").read_text().splitlines()
    assert [line for line in code.splitlines() if line not in written] == []


WRONG = """
import numpy as np
from engines.algorithms.advantages import Advantages
from engines.algorithms.inputs import TokenLoss, Unit
from engines.algorithms.spec import AdvantageParams, FilterParams, LossParams

NUMBER = 0.5

class Nameless(LossParams):
    width: float = 1.0

class NamelessAdvantage(AdvantageParams):
    pass

class Misspelt(LossParams):
    function = "wrong_losses:los"

class MisspeltAdvantage(AdvantageParams):
    function = "wrong_losses:media"

class MisspeltFilter(FilterParams):
    function = "wrong_losses:absent_filter"

class NoFunction(LossParams):
    function = "wrong_losses:NUMBER"

def loss(x, p):
    return RETURNS[p.what](x)

RETURNS = {
    "tensor": lambda x: -x.logprobs,
    "nothing": lambda x: None,
    "averaged": lambda x: TokenLoss(-x.logprobs.mean()),
    "of rows": lambda x: TokenLoss(x.sequence_sum(-x.logprobs)),
    "of tokens": lambda x: TokenLoss(-x.logprobs, Unit.SEQUENCE),
    "what it did not ask for": lambda x: TokenLoss(x.logprobs - x.old_logprobs),
    "float stat": lambda x: TokenLoss(-x.logprobs, stats={"mine/nll": 0.5}),
}

class Returns(LossParams):
    function = "wrong_losses:loss"
    requires = frozenset({"rewards"})
    what: str

def advantage(x, p):
    return {
        "array": lambda: x.spread(x.rewards),
        "what it did not ask for": lambda: Advantages(-x.values),
        "per row": lambda: Advantages(x.rewards),
        "kept tokens": lambda: Advantages(x.spread(x.rewards), kept=x.spread(x.rewards) > 0),
    }[p.what]()

class ReturnsAdvantage(AdvantageParams):
    function = "wrong_losses:advantage"
    what: str

def one_flag(x, p):
    return True

class OneFlag(FilterParams):
    function = "wrong_losses:one_flag"
"""


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_losses.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_losses", raising=False)


def loss(name: str, **args: Any) -> dict[str, Any]:
    return {"policy_loss_fn": f"wrong_losses:{name}", "policy_loss_fn_args": args}


def advantage(name: str, **args: Any) -> dict[str, Any]:
    return {"advantage_fn": f"wrong_losses:{name}", "advantage_fn_args": args}


def passes(name: str) -> dict[str, Any]:
    return {"filters": ({"name": f"wrong_losses:{name}"},)}


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (loss("Nameless"), ["'Nameless' is not named", 'function = "module:name"', "wrong_losses:Nameless"]),
        (loss("Nameless", widths=2.0), ["policy_loss_fn = 'Nameless'", "widths", "got 2.0", "did you mean width?"]),
        (loss("Nameless", width="far"), ["policy_loss_fn = 'Nameless'", "width", "valid number", "'far'"]),
        (loss("Absent"), ["policy_loss_fn = 'wrong_losses:Absent'", "cannot be imported", "Absent"]),
        (loss("NamelessAdvantage"), ["'wrong_losses:NamelessAdvantage'", "no subclass of LossParams"]),
        (loss("Misspelt"), ["the function of 'Misspelt'", "wrong_losses:los", "cannot be imported"]),
        (loss("NoFunction"), ["the function of 'NoFunction' (wrong_losses:NUMBER) is a float, not a function"]),
        (advantage("NamelessAdvantage"), ["'NamelessAdvantage' is not named", "wrong_losses:NamelessAdvantage"]),
        (advantage("MisspeltAdvantage"), ["the function of 'MisspeltAdvantage'", "wrong_losses:media"]),
        (passes("MisspeltFilter"), ["the function of 'MisspeltFilter'", "wrong_losses:absent_filter"]),
    ],
)
def test_what_is_wrong_is_refused_before_the_first_step(algorithm: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        trained(engine_config(algorithm | {"kl_loss_fn": "none"}), [], 0)
    for word in words:
        assert word in str(error.value)


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (loss("Returns", what="tensor"), ["wrong_losses:loss gave a Tensor", "return TokenLoss(value)"]),
        (loss("Returns", what="nothing"), ["wrong_losses:loss gave a NoneType", "return TokenLoss(value)"]),
        (loss("Returns", what="averaged"), ["wrong_losses:loss", "shape []", "must be [9]", "not averaged"]),
        (loss("Returns", what="of rows"), ["wrong_losses:loss", "shape [3]", "unit token", "must be [9]"]),
        (loss("Returns", what="of tokens"), ["wrong_losses:loss", "shape [9]", "unit sequence", "must be [3]"]),
        (
            loss("Returns", what="what it did not ask for"),
            ["wrong_losses:loss failed", "not given to it: old_logprobs", "`requires` of Returns, which has rewards"],
        ),
        (loss("Returns", what="float stat"), ["wrong_losses:loss gave a float as stat 'mine/nll'", "token_mean"]),
        (
            advantage("ReturnsAdvantage", what="what it did not ask for"),
            ["wrong_losses:advantage failed", "values", "`requires` of ReturnsAdvantage, which has rewards"],
        ),
        (advantage("ReturnsAdvantage", what="array"), ["wrong_losses:advantage gave a ndarray", "Advantages(values)"]),
        (advantage("ReturnsAdvantage", what="per row"), ["values of shape [3]", "must be [9]", "x.spread(values)"]),
        (advantage("ReturnsAdvantage", what="kept tokens"), ["kept of shape [9]", "must be [3]", "for each row"]),
        (passes("OneFlag"), ["wrong_losses:one_flag gave flags of shape []", "must return [3]"]),
    ],
)
def test_what_a_function_must_not_give_back_is_said(algorithm: dict[str, Any], words: list[str]) -> None:
    exps = [exp for exp in groups(num_groups=1, group_size=3)]
    for exp, length in zip(exps, (2, 3, 4), strict=True):
        exp.tokens = np.arange(5, 6 + length + exp.prompt_length - 1, dtype=np.int32)
        exp.logprobs, exp.action_mask = np.zeros(length, np.float32), np.ones(length, np.bool_)
    with pytest.raises(EngineError) as error:
        trained(engine_config(algorithm | {"kl_loss_fn": "none"}), exps, 1)
    for word in words:
        assert word in str(error.value)
