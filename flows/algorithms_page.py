"""What `trinity-flows algorithms` prints. Owns looks: what is said comes from `engines.algorithms.describe`.

On a terminal: within 100 columns. Elsewhere: the list is a table with tabs, and no line of a page is wrapped.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console

from engines.algorithms.describe import AlgorithmPage, Listing, NeedPage, ParameterPage, PartPage

WIDEST = 100
COLUMNS = (
    "name",
    "meaning",
    "source",
    "advantage",
    "policy_loss",
    "group_size",
    "aggregation",
    "kl",
    "entropy",
    "needs",
)
NAME, MEANING = 20, 40
"""Columns of the list on a terminal."""


def print_list(listing: Listing, console: Console | None = None) -> None:
    """All algorithms, and the names of the parts."""
    console = console or Console()
    if not console.is_terminal:
        for row in (COLUMNS, *map(row_of, listing.algorithms)):
            console.file.write("\t".join(row) + "\n")  # rich would make spaces of the tabs
    else:
        _line(console, f"{'algorithm':<{NAME}}{'what it is':<{MEANING}}source", "bold")
        _line(console, "  advantage + policy loss, n samples per task, aggregation, KL, entropy bonus H; needs", "dim")
        for page in listing.algorithms:
            needs = "" if page.needs_in_short == "-" else f"; needs {page.needs_in_short}"
            _line(console, f"{page.name:<{NAME}}{page.meaning:<{MEANING}}{page.source}")
            _line(console, f"  {composition(page)}{needs}", "dim")
        _line(console, "")
        for key, names in listing.parts.items():
            _text(console, f"{key}: {', '.join(names)}", "  ")
        _text(
            console,
            "Formula, parameters, needs, differences: trinity-flows algorithms NAME, or PART as in kl_loss_fn.k2",
        )
    for name, reason in listing.broken.items():
        _line(Console(stderr=True), f"{name} is installed, but: {reason}")


def row_of(page: AlgorithmPage) -> tuple[str, ...]:
    """One field for each of `COLUMNS`."""
    values = page.model_dump(include=set(COLUMNS)) | {"needs": page.needs_in_short}
    return tuple(str(values[column]) for column in COLUMNS)


def composition(page: AlgorithmPage) -> str:
    """What it is made of, in short."""
    made_of = page.policy_loss if page.advantage == "-" else f"{page.advantage} + {page.policy_loss}"
    kl = "" if page.kl == "-" else f", {page.kl}"
    entropy = "" if page.entropy == "-" else f", H {page.entropy.rpartition(' ')[2]}"
    return f"{made_of}, n {page.group_size}, {page.aggregation}{kl}{entropy}"


def print_page(page: AlgorithmPage | PartPage, console: Console | None = None) -> None:
    """All about one algorithm, or one part."""
    console = console or Console()
    if isinstance(page, PartPage):
        _print_part(page, console)
        _print_needs(page.needs, console)
        return
    _line(console, f"{page.name}: {page.meaning}", "bold")
    _line(console, page.source)
    _line(console, composition(page))
    _print_needs(page.needs, console)
    for part in page.parts:
        _line(console, "")
        _print_part(part, console)
    _heading(console, "the whole")
    _print_parameters(page.parameters, console)
    _print_differences(page.differs, console)


def _print_part(page: PartPage, console: Console) -> None:
    _line(console, page.name, "bold")
    for paragraph in page.text:
        _text(console, paragraph, "  ")
    _text(console, f"chosen by {page.chosen_by}", "  ")
    _print_parameters(page.parameters, console)
    _print_differences(page.differs, console)


def _print_parameters(parameters: Iterable[ParameterPage], console: Console) -> None:
    for parameter in parameters:
        default = "  (must be given)" if parameter.required else f"={json.dumps(parameter.default)}"
        _line(console, f"  {parameter.key}{default}")
        explained = f"{parameter.meaning} {f'({parameter.allowed})' if parameter.allowed else ''}".strip()
        if explained:
            _text(console, explained, "      ")


def _print_needs(needs: Sequence[NeedPage], console: Console) -> None:
    _heading(console, "needs" if needs else "needs nothing but rows with tokens that train")
    for need in needs:
        _text(console, f"{need.name}: {need.meaning}", "  ", "      ")


def _print_differences(differs: Sequence[str], console: Console) -> None:
    if differs:
        _line(console, "  differs from Trinity-RFT 0.6.0:")
    for difference in differs:
        _text(console, f"* {difference}", "    ", "      ")


def _heading(console: Console, text: str) -> None:
    _line(console, "")
    _line(console, text, "bold")


def _text(console: Console, text: str, indent: str = "", following: str | None = None) -> None:
    """A paragraph, wrapped on a terminal. `following`: indent of its further lines."""
    following = indent if following is None else following
    if not console.is_terminal:
        _line(console, indent + text)
        return
    width = min(console.width, WIDEST)
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )
    for line in lines:
        _line(console, line)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True, emoji=False)
