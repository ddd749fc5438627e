"""The loader itself: it finds a wrong number in any file, and passes nothing in silence."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.algorithms.inputs import LossInputs, TokenLoss
from engines.algorithms.losses import sapo
from engines.algorithms.spec import Sapo
from tests.golden import derived_losses, losses
from tests.golden.__main__ import main
from tests.golden.checks import compared
from tests.golden.format import Case
from tests.golden.test_vectors import FILES, VECTORS

Document = dict[str, Any]


def document(name: str) -> Document:
    return json.loads((VECTORS / f"{name}.json").read_text())


def written(folder: Path, name: str, content: Document | str) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / f"{name}.json").write_text(text)
    return folder


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where the numbers of a case's outputs are, metrics aside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield (key,)
        elif key != "metrics":
            yield from ((key, *rest) for rest in paths(item))


def a_thousandth_off(case: Document) -> None:
    """Change one number of the case's outputs."""
    holder, path = case, ("outputs", *next(paths(case["outputs"]), ()))
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = holder[path[-1]] * 1.001 + 0.001


def with_numbers(name: str) -> list[Document]:
    """The cases of a file that have a number, or are one."""
    cases = document(name)["cases"]
    return [case for case in cases if isinstance(case["outputs"], float) or any(paths(case["outputs"]))]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
@pytest.mark.parametrize("position", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_changed_number_is_found(
    path: Path, position: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = with_numbers(path.stem)
    if path.stem == "algorithm_defaults":  # its last case is refused here, whatever its numbers
        cases = cases[:-1]
    if path.stem == "algorithm_grpo_verl_quirk":  # an error alone: found if it is gone
        cases = [{"name": "dataproto", "outputs": {"loss": 0.0}}]
    case = cases[round(position * (len(cases) - 1))]
    content = {"cases": [case]}
    if path.stem != "algorithm_grpo_verl_quirk":
        assert main([str(written(tmp_path, path.stem, content))]) == 0
        if path.stem == "algorithm_defaults":
            case["outputs"]["repeat_times"] = 7
            case["outputs"]["policy_loss_fn"] = "another"
        else:
            a_thousandth_off(case)
    capsys.readouterr()
    assert main([str(written(tmp_path, path.stem, content))]) == 1
    shown = capsys.readouterr().out
    assert path.stem in shown
    assert f"    {case['name']}: " in shown


@pytest.mark.parametrize("name", ["policy_loss_sapo", "policy_loss_dpo", "advantage_ppo", "advantage_grpo"])
def test_a_changed_input_of_a_deviating_case_is_found(name: str, tmp_path: Path) -> None:
    content = document(name)
    inputs = content["cases"][0]["inputs"]
    if isinstance(inputs, list):
        inputs[0]["reward"] += 1e-3
    else:
        inputs[next(key for key in ("logprob", "values") if key in inputs)][0][0] += 1e-3
    assert main([str(written(tmp_path, name, content))]) == 1


def test_a_fault_of_ours_is_found_in_a_case_that_deviates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The independent derivation does not move with our code."""
    (case, *_) = document("policy_loss_sapo")["cases"]
    given = Case(case["name"], case["init_args"], case["inputs"], case["outputs"])
    assert losses.policy_loss("sapo", given).failures == []

    def wrong(x: LossInputs, p: Sapo) -> TokenLoss:
        loss = sapo(x, p)
        return TokenLoss(loss.value * (1 + 1e-8), stats=loss.stats)

    monkeypatch.setattr(losses, "function_of", lambda params: wrong)
    verdict = losses.policy_loss("sapo", given)
    assert verdict.differences == {3}
    assert [check.what for check in verdict.failures] == ["loss, derived", "gradient, derived"]


def test_derivations_use_nothing_of_the_engines() -> None:
    for path in Path(derived_losses.__file__).parent.glob("derived_*.py"):
        assert "import engines" not in path.read_text()
        assert "from engines" not in path.read_text()


def broken(change: Callable[[Document], None], name: str = "policy_loss_ppo") -> Document:
    content = copy.deepcopy(document(name))
    change(content)
    return content


def _set(content: Document, key: str, value: Any) -> None:
    content["cases"][0][key] = value


REFUSED: dict[str, tuple[str, Document | str, str]] = {
    "unknown file of a numeric group": ("policy_loss_nonsense", document("policy_loss_ppo"), "nothing here evaluates"),
    "unknown beginning of a numeric group": ("verl_nonsense", document("verl_agg_loss"), "nothing here evaluates"),
    "no JSON": ("kl_k1", "{", "cannot be read"),
    "no cases": ("kl_k1", {"cases": []}, "no list `cases`"),
    "not an object": ("kl_k1", "[]", "no list `cases`"),
    "a case without outputs": ("policy_loss_ppo", broken(lambda c: c["cases"][0].pop("outputs")), "no outputs"),
    "a missing input": ("policy_loss_ppo", broken(lambda c: c["cases"][0]["inputs"].pop("action_mask")), "no mask"),
    "an unknown init_arg": (
        "policy_loss_ppo",
        broken(lambda c: c["cases"][0]["init_args"].update(nonsense=1)),
        "nonsense",
    ),
    "an unknown init_arg of a KL": ("kl_k2", broken(lambda c: c["cases"][0]["init_args"].update(no=1), "kl_k2"), "no"),
    "an unknown init_arg of an advantage": (
        "advantage_grpo",
        broken(lambda c: c["cases"][0]["init_args"].update(nonsense=1), "advantage_grpo"),
        "nonsense",
    ),
    "an unknown metric": (
        "policy_loss_ppo",
        broken(lambda c: c["cases"][0]["outputs"]["metrics"].update(nonsense=1.0)),
        "metric nonsense is known",
    ),
    "an error that no difference covers": (
        "policy_loss_ppo",
        broken(lambda c: _set(c, "outputs", {"error": "KeyError: 'x'"})),
        "covers",
    ),
    "an error in an advantage that no difference covers": (
        "advantage_opmd",
        broken(lambda c: _set(c, "outputs", {"error": "KeyError: 'x'"}), "advantage_opmd"),
        "covers",
    ),
    "another order of rows": (
        "advantage_grpo",
        broken(lambda c: c["cases"][3]["outputs"]["order"].reverse(), "advantage_grpo"),
        "order",
    ),
    "a row too many": (
        "advantage_grpo",
        broken(lambda c: c["cases"][0]["outputs"]["order"].append(0), "advantage_grpo"),
        "no row more than once",
    ),
    "another mask": (
        "advantage_clipb",
        broken(lambda c: c["cases"][0]["outputs"]["response_mask_after"][0].__setitem__(0, False), "advantage_clipb"),
        "mask",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_passes_in_silence(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content, why = REFUSED[what]
    assert main([str(written(tmp_path, name, content))]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert why in shown


PARTIAL: dict[str, dict[str, Any]] = {
    "policy_loss_ppo": {"clip_ratio_c": 3.0},
    "policy_loss_mix": {"mu": 0.5},
    "policy_loss_rec": {"clip_mode": "ring"},
    "advantage_clipv": {"max_frac": 1.0},
}
"""File -> init_args that name only some."""


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_arguments_change_only_what_they_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Difference 8: the rest is ours, as derived; there it is the constructor's, with other defaults or none."""
    raises = name in ("policy_loss_ppo", "policy_loss_mix")
    cases, args = document(name)["cases"], PARTIAL[name]
    case = cases[0] if raises else next(c for c in cases if c["init_args"].items() >= args.items())
    outputs = {"error": "AssertionError: no clip range"} if raises else case["outputs"]
    code = main([str(written(tmp_path, name, {"cases": [case | {"init_args": args, "outputs": outputs}]}))])
    assert code == 0 or not raises
    shown = capsys.readouterr().out
    assert "#8" in shown
    assert "derived" not in shown


def test_repeated_groups_may_be_any_but_must_be_whole(tmp_path: Path) -> None:
    """Two of four groups dropped: both copies of b, or of c, or one of each."""
    args = {"epsilon": 1e-6, "std_threshold": 0.1, "duplicate_experiences": True}
    rewards = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [2.0, 0.0], "d": [0.5]}
    rows = [{"task": t, "reward": r, "rlen": 1} for t, group in rewards.items() for r in group]
    a = 1 / (2 * (0.5**0.5 + 1e-6)), 1 / (2**0.5 + 1e-6)
    value = {2: -a[0], 3: a[0], 4: a[1], 5: -a[1]}
    for copies, code in (([2, 3, 4, 5], 0), ([4, 5, 4, 5], 0), ([2, 3], 1), ([2, 4, 3, 5], 1), ([0, 1, 2, 3], 1)):
        order = [2, 3, 4, 5, *copies]
        values = [[value.get(row, 0.0)] for row in order]
        outputs = {"order": order, "advantages": values, "returns": values, "metrics": {}}
        case = {"name": "x", "init_args": args, "inputs": [{"i": i} | row for i, row in enumerate(rows)]}
        assert main([str(written(tmp_path, "advantage_grpo", {"cases": [case | {"outputs": outputs}]}))]) == code


@pytest.mark.parametrize("others", [[], ["batch_layout", "eid"]], ids=["empty", "none of a numeric group"])
def test_a_folder_without_a_numeric_file_is_an_error(others: list[str], tmp_path: Path) -> None:
    for name in others:
        written(tmp_path, name, {"cases": []})
    assert main([str(tmp_path)]) == 1
    assert main([str(tmp_path / "missing")]) == 1


def test_files_of_other_groups_are_skipped_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, "eid", "no golden file at all")
    assert main([str(written(tmp_path, "lr_schedules", document("lr_schedules")))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("eid ") and "skipped" in line for line in lines)
    assert any(line.split()[:2] == ["lr_schedules", "5"] for line in lines)


def test_command() -> None:
    """As a command, on these vectors: exit code 0 and one line for each file."""
    root = VECTORS.parents[2]
    command = [sys.executable, "-P", "-m", "tests.golden", str(VECTORS)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in FILES} <= {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("ours", "wanted", "passes"),
    [
        ([1.0, np.nan, np.inf], ["1", "nan", "inf"], True),
        ([1.0 + 1e-10], [1.0], True),
        ([1.0 + 1e-8], [1.0], False),
        ([np.inf], ["-inf"], False),
        ([0.0], ["nan"], False),
        ([np.nan], [0.0], False),
        ([1.0, 2.0], [1.0], False),
        ([0.0], [1e-12], False),
        ([], [], True),
    ],
)
def test_comparison(ours: list[float], wanted: list[Any], passes: bool) -> None:
    check = compared("x", ours, wanted, rtol=1e-9, atol=1e-13)
    assert check.passed is passes
    assert (check.rel_error <= 1e-9) is passes
