"""What is said of an algorithm is true: its parameters, where each is set, what it needs, and who wrote it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal, get_args

import pytest
from pydantic import ValidationError
from rich.console import Console

from engines import plugins
from engines.algorithms import presets
from engines.algorithms.describe import (
    NEEDS,
    AlgorithmPage,
    ParameterPage,
    PartPage,
    describe,
    describe_algorithm,
    listing,
    sources,
)
from engines.algorithms.presets import ABOUT, PRESETS, resolve
from engines.algorithms.spec import LossParams, Need
from engines.config import AlgorithmConfig
from engines.errors import ConfigError
from flows.algorithms_page import COLUMNS, MEANING, NAME, WIDEST, print_list, print_page

PARTS = [f"{key}.{name}" for key, names in listing().parts.items() for name in names]


class Shifted(LossParams):
    """-(A + shift) lp. Nobody et al. 2031 (SHIFT), arXiv:3101.00001, eq. 2."""

    requires: ClassVar[frozenset[Need]] = frozenset({"old_logprobs"})
    function: ClassVar[str] = "nowhere:shifted"
    differs: ClassVar[tuple[str, ...]] = ("Trinity-RFT knows no shift.",)
    name: Literal["shifted"] = "shifted"
    shift: float
    """Added to A."""


MINE = PRESETS["grpo"].model_copy(update={"loss": Shifted(shift=0.5), "group_size": 6})


def algorithm_page(name: str) -> AlgorithmPage:
    page = describe(name)
    assert isinstance(page, AlgorithmPage)
    return page


def part_page(name: str) -> PartPage:
    page = describe(name)
    assert isinstance(page, PartPage)
    return page


def parameters(page: AlgorithmPage) -> dict[str, ParameterPage]:
    pages = [*page.parameters, *(parameter for part in page.parts for parameter in part.parameters)]
    return {parameter.key: parameter for parameter in pages}


# -- the facts --------------------------------------------------------------------------------------------------------


def test_dapo_by_hand() -> None:
    page = algorithm_page("dapo")
    assert (page.advantage, page.policy_loss, page.group_size, page.aggregation) == ("grpo", "ppo", 16, "token-mean")
    assert (page.kl, page.entropy, page.source) == ("-", "default 0", "Yu et al. 2025, arXiv:2503.14476")
    assert [part.name for part in page.parts] == [
        "advantage_fn.grpo", "policy_loss_fn.ppo", "entropy_loss_fn.default", "filters.dynamic_sampling"
    ]  # fmt: skip
    found = parameters(page)
    assert found["algorithm.policy_loss_fn_args.clip_range_high"].default == 0.28
    assert found["algorithm.policy_loss_fn_args.clip_range_high"].allowed == ">= 0"
    assert found["algorithm.filters.dynamic_sampling.args.metric_key"].default == "accuracy"
    assert found["algorithm.repeat_times"].default == 16
    assert found["algorithm.loss_agg_mode"].allowed.split(", ")[1] == "seq-mean-token-sum"
    assert part_page("policy_loss_fn.ppo").parameters[2].default is None


def test_ppo_and_rec_by_hand() -> None:
    ppo, rec = algorithm_page("ppo"), algorithm_page("rec")
    assert (ppo.kl, ppo.entropy) == ("k2 0.001", "default 0")
    assert ppo.needs_in_short == "rewards, logprobs, reference, critic"
    assert parameters(ppo)["algorithm.critic.cliprange_value"].default == 0.5
    assert not any(key.startswith("algorithm.critic") for key in parameters(rec))
    assert parameters(rec)["algorithm.advantage_fn_args.drop"].allowed == "balance"
    assert parameters(rec)["algorithm.policy_loss_fn_args.temp"].allowed == "> 0"


def test_every_preset_says_what_it_is_and_whose() -> None:
    assert list(ABOUT) == list(PRESETS) == [page.name for page in listing().algorithms]
    for name, about in ABOUT.items():
        assert 10 < len(about.meaning) < MEANING, name
        assert sources([about.source]) == (about.source,), name


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_explained(name: str) -> None:
    page = part_page(name)
    assert page.name == name
    assert all(parameter.meaning.endswith(".") for parameter in page.parameters), page.parameters
    words = " ".join([*page.text, *(parameter.meaning for parameter in page.parameters)])
    cited = {source.partition(", ")[2] for source in page.sources}
    assert cited == set(re.findall(r"arXiv:[\d.]*\d", words)), "write it: Author et al. 2025, arXiv:2501.00001"


def changes(parameter: ParameterPage) -> Iterator[Any]:
    """Values to try for a parameter, none of them its own."""
    values = [True, False, 0.25, 0.6, 0.01, 2, 3, 1.5, *parameter.allowed.split(", "), "other"]
    yield from (value for value in values if value != parameter.default)


def config_with(algorithm: str, key: str, value: Any, parts: dict[str, PartPage]) -> AlgorithmConfig:
    """What a YAML file says that sets this one key."""
    names = key.split(".")[1:]
    if names[0] == "filters":
        part = {"name": names[1], "args": {names[3]: value}}
        return AlgorithmConfig.model_validate({"algorithm_type": algorithm, "filters": [part]})
    if names[0] in ("rollout_correction", "overlong_shaping"):
        chosen = parts[names[0]].name.partition(".")[2]
        section = {names[0]: {"name": chosen, "args": {names[2]: value}}, "bypass_old_logprobs": False}
        return AlgorithmConfig.model_validate({"algorithm_type": algorithm, **section})
    section: Any = value
    for name in reversed(names):
        section = {name: section}
    return AlgorithmConfig.model_validate({"algorithm_type": algorithm, **section})


@pytest.mark.parametrize("name", PRESETS)
def test_each_key_changes_its_own_parameter_alone(name: str) -> None:
    """adaptive alone is refused whatever it is: it needs a target and a horizon beside it."""
    page = algorithm_page(name)
    before = parameters(page)
    refused: set[str] = set()
    for key, parameter in before.items():
        if key.startswith("algorithm.critic."):
            continue
        for value in changes(parameter):
            try:
                algorithm = resolve(config_with(name, key, value, {}))
            except (ConfigError, ValidationError):
                continue
            after = parameters(describe_algorithm(name, algorithm))
            assert {k for k in before if after[k].default != before[k].default} == {key}
            assert after[key].default == value
            break
        else:
            refused.add(key.rpartition(".")[2])
    assert refused <= {"adaptive"}
    assert len(before) >= 4


@pytest.mark.parametrize(("key", "part"), [("rollout_correction", "mask"), ("overlong_shaping", "overlong")])
def test_keys_of_the_parts_that_no_preset_has(key: str, part: str) -> None:
    page = part_page(part)
    values = {"level": "geometric", "cap": 3.0}
    for parameter in page.parameters:
        value = values.get(parameter.name, 0.5)
        config = config_with("grpo", parameter.key, value, {key: page})
        after = parameters(describe_algorithm("grpo", resolve(config)))
        assert after[parameter.key].default == value != parameter.default


def test_the_line_that_chooses_a_part_chooses_it() -> None:
    assert part_page("kl_loss_fn.k3").chosen_by == "algorithm.kl_loss_fn: k3"
    assert part_page("reward_filter").chosen_by == "algorithm.filters: [{name: reward_filter, args: {...}}]"
    assert part_page("mask").chosen_by == "algorithm.rollout_correction: {name: mask, args: {...}}"
    page = describe_algorithm("grpo", resolve(AlgorithmConfig(kl_loss_fn="k3", kl_loss_fn_args={"kl_coef": 0.5})))
    assert page.kl == "k3 0.5"
    lowered = resolve(AlgorithmConfig(kl_loss_fn="none", kl_penalty_fn="k1"))
    assert describe_algorithm("grpo", lowered).kl == "k1 0.001 in the reward"


def test_every_need_is_explained() -> None:
    assert set(NEEDS) == set(get_args(Need))
    needs = {need.name: need for need in algorithm_page("mix").needs}
    assert {"expert_rows", "reference", "old_logprobs"} <= needs.keys()
    assert "info.is_expert" in needs["expert_rows"].meaning
    assert (algorithm_page("sft").needs, algorithm_page("sft").needs_in_short) == ((), "-")
    assert algorithm_page("dpo").needs_in_short == "reference, pairs"
    assert [need.name for need in part_page("clipv").needs] == ["rewards", "old_logprobs", "distribution"]
    assert "reward_baseline" in NEEDS["greedy_baseline"][1]
    assert "model.teacher_model_path" in NEEDS["teacher_logprobs"][1]


DIFFERENCES = [
    ("sft", "One denominator for a whole update"),
    ("policy_loss_fn.dpo", "One sigmoid for each pair"),
    ("policy_loss_fn.sapo", "differentiated through its gate"),
    ("dpo", "Rows without an action token count nowhere"),
    ("advantage_fn.ppo", "Runs over action tokens alone"),
    ("advantage_fn.reinforceplusplus", "Runs over action tokens alone"),
    ("advantage_fn.grpo", "A group of one has advantage 0"),
    ("advantage_fn.rloo", "A group of one has advantage 0"),
    ("advantage_fn.rec", "A group of one has advantage 0"),
    ("policy_loss_fn.rec", "gspo_importance_sampling works"),
    ("kl_loss_fn.k2", "adaptive works"),
    ("kl_penalty_fn.k1", "A reference model is there"),
    ("grpo", "The preset's group size is applied"),
    ("policy_loss_fn.gspo", "seq-mean-token-mean is applied"),
    ("policy_loss_fn.mix_chord", "each have their own denominator"),
    ("advantage_fn.step_wise_grpo", "largest eid.step"),
    ("advantage_fn.grpo", "rank_penalty: mean, std and numerator"),
    ("gspo", "Every metric declares"),
    ("kl_loss_fn.corrected_k3", "the gradient runs through its ratio"),
    ("dapo", "upper clip range 0.28"),
]


@pytest.mark.parametrize(("name", "words"), DIFFERENCES)
def test_wanted_differences_stand_where_they_belong(name: str, words: str) -> None:
    assert sum(words in difference for difference in describe(name).differs) == 1


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_part_goes_by_its_own_name_if_no_other_has_it() -> None:
    assert describe("clip_cov").name == "policy_loss_fn.clip_cov"
    assert describe("overlong").name == "overlong_shaping.overlong"
    assert isinstance(describe("ppo"), AlgorithmPage)
    assert part_page("engines.algorithms.spec:Dpo") == part_page("policy_loss_fn.dpo")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grop", "algorithm 'grop' is not known; did you mean grpo?"),
        ("clip_covv", "did you mean clip_cov?"),
        ("policy_loss_fn.gsop", "algorithm.policy_loss_fn = 'gsop' is not known; did you mean gspo?"),
        ("xyzzy", "algorithm 'xyzzy' is not known; known: asymre, cispo"),
        ("k2", "several parts; say which: kl_loss_fn.k2, kl_penalty_fn.k2"),
        ("kl_loss_fn.k1", "the gradient of k1 has expectation 0"),
        ("os:getcwd", "'os:getcwd' is neither an Algorithm nor a params class"),
        ("nowhere:MINE", r"algorithm \(nowhere:MINE\) cannot be imported"),
    ],
)
def test_a_wrong_name_gets_what_was_meant(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe(name)


def test_a_loss_of_the_users_own() -> None:
    page = part_page(f"{__name__}:Shifted")
    assert (page.name, page.function) == (f"{__name__}:Shifted", "nowhere:shifted")
    assert page.chosen_by == f"algorithm.policy_loss_fn: {__name__}:Shifted"
    assert page.sources == ("Nobody et al. 2031, arXiv:3101.00001",)
    assert page.differs == ("Trinity-RFT knows no shift.",)
    assert [need.name for need in page.needs] == ["old_logprobs"]
    (shift,) = page.parameters
    assert (shift.key, shift.required, shift.default) == ("algorithm.policy_loss_fn_args.shift", True, None)
    assert "algorithm.policy_loss_fn_args.shift  (must be given)\n" in printed(page, is_terminal=False)


class Bare(LossParams):
    """-width A lp."""

    function = "nowhere:bare"
    width: float = 0.5


def test_a_loss_without_name_and_explanations() -> None:
    lines = printed(part_page(f"{__name__}:Bare"), is_terminal=False).splitlines()
    chosen_by = f"  chosen by algorithm.policy_loss_fn: {__name__}:Bare"
    assert lines[1:4] == ["  -width A lp.", chosen_by, "  algorithm.policy_loss_fn_args.width=0.5"]
    assert lines[-1] == "needs nothing but rows with tokens that train"
    assert all(line.strip() for line in lines[:4])


def test_an_algorithm_of_the_users_own() -> None:
    page = algorithm_page(f"{__name__}:MINE")
    assert (page.meaning, page.policy_loss, page.group_size) == ("grpo + shifted", "shifted", 6)
    assert page.source.startswith("Shao et al. 2024, arXiv:2402.03300; ")
    assert "Nobody et al. 2031, arXiv:3101.00001" in page.source
    assert parameters(page)["algorithm.policy_loss_fn_args.shift"].default == 0.5


def test_installed_algorithms_are_listed_and_broken_ones_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        EntryPoint("mine", f"{__name__}:MINE", presets.ENTRY_POINT_GROUP),
        EntryPoint("broken", f"{__name__}:MISSING", presets.ENTRY_POINT_GROUP),
    ]
    entries.append(EntryPoint("shifty", f"{__name__}:Shifted", "trinity_flows.losses"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry for entry in entries if entry.group == group])
    found = listing()
    assert found.parts["policy_loss_fn"][-1] == "shifty"
    assert describe("shifty") == describe("policy_loss_fn.shifty") == describe(f"{__name__}:Shifted")
    assert [page.name for page in found.algorithms] == [*PRESETS, "mine"]
    assert found.broken.keys() == {"broken"}
    assert describe("mine").name == "mine"
    print_list(found, Console(file=io.StringIO()))
    assert re.search(r"^broken is installed, but: .*MISSING.* cannot be imported", capsys.readouterr().err)


# -- looks ------------------------------------------------------------------------------------------------------------


def printed(page: AlgorithmPage | PartPage | None, is_terminal: bool) -> str:
    """What is printed of a page, or of the list."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=140 if is_terminal else 40)
    if page is None:
        print_list(listing(), console)
    else:
        print_page(page, console)
    return file.getvalue()


def test_the_list_is_a_table_with_tabs_unless_on_a_terminal() -> None:
    head, *rows = (line.split("\t") for line in printed(None, is_terminal=False).splitlines())
    assert tuple(head) == COLUMNS
    assert [row[0] for row in rows] == list(PRESETS)
    grpo = dict(zip(head, rows[list(PRESETS).index("grpo")], strict=True))
    assert (grpo["group_size"], grpo["kl"], grpo["needs"]) == ("2", "k2 0.001", "rewards, logprobs, reference")


def test_on_a_terminal_the_list_fits_and_keeps_its_columns() -> None:
    lines = printed(None, is_terminal=True).splitlines()
    assert max(map(len, lines)) <= WIDEST
    (jsd,) = (line for line in lines if line.startswith("jsd "))
    assert (jsd[:NAME].strip(), jsd[NAME + MEANING :]) == ("jsd", "Agarwal et al. 2023, arXiv:2306.13649")
    assert lines[lines.index(jsd) + 1].strip() == "jsd + ppo, n 8, token-mean; needs logprobs, teacher"


@pytest.mark.parametrize("name", [*PRESETS, *PARTS])
def test_on_a_terminal_a_page_fits(name: str) -> None:
    assert max(map(len, printed(describe(name), is_terminal=True).splitlines())) <= WIDEST


def test_elsewhere_a_page_has_one_line_for_each_key_and_its_value() -> None:
    page = algorithm_page("dapo")
    text = printed(page, is_terminal=False)
    found = dict(re.findall(r"^  (algorithm\.\S+?)=(.+)$", text, re.MULTILINE))
    assert {key: json.loads(value) for key, value in found.items()} == {
        key: parameter.default for key, parameter in parameters(page).items()
    }
    for difference in (*page.differs, *page.parts[0].differs, *page.parts[0].text):
        assert sum(difference in line for line in text.splitlines()) == 1
