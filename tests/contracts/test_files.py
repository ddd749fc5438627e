"""House rules that no linter knows: size, names, docstrings, and the few places that may catch everything."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("engines", "trinity_tasks", "flows")
SHIPPED = sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))
EVERY = sorted([*SHIPPED, *(REPO / "tests").rglob("*.py")])
MAX_LINES = 500
VAGUE = {"utils", "util", "common", "manager", "core", "helpers", "misc"}

# Broad `except` hides faults. Each of these places has a policy for what it catches, in a comment beside it.
BROAD_EXCEPT_ALLOWED = {
    "trinity_tasks/tracking.py": "the tracker's spool: an outage never stops training",
    "trinity_tasks/checkpoint.py": "the background uploader: raised again at the next step",
    "trinity_tasks/rewards.py": "a user's reward function: the run says what it did, and where",
    "trinity_tasks/operators.py": "a user's operator: the run says what it did, and where",
    "engines/hf/engine.py": "the engine boundary: a failed step makes the engine unusable",
    "flows/cli.py": "the top of the command line: one line and an exit code",
}
# These run code when they read: nothing that comes back from storage may pass through them.
CODE_CARRYING = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_roots(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0]


def dotted(node: ast.expr) -> str:
    """`torch.load` for that expression, "" for anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(is_broad(item) for item in caught.elts)
    return caught is None or dotted(caught).removeprefix("builtins.") in ("Exception", "BaseException")


def always_raises_again(handler: ast.ExceptHandler) -> bool:
    """Cleaning up and then `raise`, with no way round it: nothing is caught."""
    last = handler.body[-1]
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in ast.walk(handler))
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def broad_catches(tree: ast.Module) -> Iterator[int]:
    """Lines that catch every exception: `except Exception`, bare `except`, `suppress(Exception)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not always_raises_again(node):
            yield node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
            yield from (node.lineno for argument in node.args if is_broad(argument))


def code_carrying_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield from ((line, root) for line, root in imported_roots(tree) if root in CODE_CARRYING)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, keywords = dotted(node.func), {item.arg: item.value for item in node.keywords}
        weights_only = keywords.get("weights_only")
        if called == "torch.load" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
            yield node.lineno, "torch.load without weights_only=True"
        if "allow_pickle" in keywords:
            yield node.lineno, "allow_pickle"


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_file_is_short_named_and_explained(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    foreign = [number for number, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not foreign, f"lines {foreign}: only ASCII in sources; write other characters as escapes"
    num_lines = text.count("\n")
    assert num_lines < MAX_LINES, f"{num_lines} lines: split it by concept"
    assert ast.get_docstring(tree_of(path)), "a module docstring says what the file owns and what it does not"
    vague = VAGUE & {part for name in path.relative_to(REPO).with_suffix("").parts for part in name.split("_")}
    assert not vague, f"{vague} says nothing: name the file after what it owns"


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_todo_has_an_issue_number(path: Path) -> None:
    marks = re.findall(r"#\s*(?:TODO|FIXME|XXX)(?!\s*\(?#\d+)", path.read_text(encoding="utf-8"))
    assert marks == []


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_nothing_read_back_can_carry_code(path: Path) -> None:
    assert list(code_carrying_reads(tree_of(path))) == []


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_broad_except_only_where_a_policy_says_so(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = list(broad_catches(tree_of(path)))
    if found and name_of(path) not in BROAD_EXCEPT_ALLOWED:
        pytest.fail(f"line {found}: catches everything; catch what can happen, or let it propagate")
    for line in found:
        nearby = lines[max(line - 2, 0) : line + 1]
        assert any("#" in text for text in nearby), f"line {line}: a comment must name the policy of this broad catch"


def test_checks_see_what_they_look_for() -> None:
    broad = """
try: ...
except (ValueError, Exception): ...
try: ...
except: ...
with contextlib.suppress(BaseException): ...
try: ...
except OSError: ...
try: ...
except BaseException:
    release()
    raise
"""
    assert sorted(broad_catches(ast.parse(broad))) == [3, 5, 6]
    unsafe = "import pickle\ntorch.load(p)\ntorch.load(p, weights_only=True)\nnp.load(p, allow_pickle=True)\n"
    assert [line for line, _ in code_carrying_reads(ast.parse(unsafe))] == [1, 2, 4]
