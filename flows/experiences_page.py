"""What `trinity-flows experiences` prints. Owns looks; what is found and copied is `trinity_tasks.browse`'s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from trinity_tasks.browse.export import NewFile, export, export_file
from trinity_tasks.browse.numbers import Bar, Numbers, Versions
from trinity_tasks.browse.report import BufferReport, SampleRow, look_at, open_scan
from trinity_tasks.reports import histogram_png

WIDEST_BAR = 40
"""Characters of the highest bar."""
MAX_VERSIONS = 12
"""Lines of the histogram of versions."""
MIN_TEXT = 12
"""Width of a prompt and of a response at least, where a line is too narrow for all."""
GAP = "  "


class Answer(BufferReport):
    """A report, and what was written beside it."""

    png: str | None
    """URL of the picture of the rewards."""
    export: str | None
    """URL of the copy of the rows."""
    num_exported: int
    """Rows in it."""


def look(
    url: str, buffer: str | None, where: str | None, *, num_samples: int, png: str | None, export_to: str | None
) -> Answer:
    """Look at a job's buffer, then write what is asked for. Raises as `open_scan`, `look_at`, `export`, `NewFile`."""
    picture = None if png is None else NewFile(png)
    copy = None if export_to is None else export_file(export_to)
    scan = open_scan(url, buffer, where)
    report = look_at(scan, num_samples)
    if picture is not None:
        bars = [(bar.low, bar.high, bar.count) for bar in (report.reward.bars if report.reward else ())]
        picture.write(histogram_png(bars, "reward"))
    num_exported = 0 if copy is None else export(scan, copy)
    return Answer(**dict(report), png=picture and picture.url, export=copy and copy.url, num_exported=num_exported)


def print_report(answer: Answer, console: Console | None = None) -> None:
    """The answer of `experiences`."""
    console = console or Console()
    _line(console, f"{answer.url}, buffer {answer.buffer}", "bold")
    if others := [name for name in answer.buffers if name != answer.buffer]:
        _line(console, f"other buffers: {', '.join(others)}")
    if answer.where is not None:
        _line(console, f"rows where {answer.where}")
    _print_counts(answer, console)
    if answer.policy_versions:
        _print_versions(answer.policy_versions, console)
    for title, numbers in (("reward", answer.reward), ("response length, tokens", answer.response_length)):
        if numbers:
            _print_numbers(title, numbers, console)
    if answer.samples:
        _print_samples(answer.samples, console)
    if answer.png:
        _line(console, f"picture of the rewards: {answer.png}")
    if answer.export:
        _line(console, f"{answer.num_exported} rows exported to {answer.export}")
    if answer.damaged:
        _line(console, f"{len(answer.damaged)} damaged shards, whose rows are not counted:", "bold")
    for shard in answer.damaged:
        _line(console, f"  {shard.name}: {shard.reason}")


def _print_counts(answer: Answer, console: Console) -> None:
    standing = answer.standing
    _line(console, f"{answer.num_rows} rows in {answer.num_groups} groups; the buffer has {answer.num_shards} shards")
    _line(console, f"by writer: {_counts(answer.rows_by_writer)}")
    _line(console, f"by type: {_counts(answer.rows_by_type)}")
    _line(console, f"unscored: {answer.num_unscored}; truncated: {answer.num_truncated}")
    _line(console, f"without a policy version, because nobody sampled them: {answer.num_unsampled}")
    _line(
        console,
        f"trained: {standing.trained}; in the ledger after the last commit: {standing.recorded}; "
        f"left behind untrained: {standing.passed}; not taken yet: {standing.waiting}",
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _print_versions(versions: Versions, console: Console) -> None:
    """One line for each version; neighbours share one if there are many."""
    _line(console, "")
    _line(console, f"policy version: min {versions.min}, median {versions.median:g}, max {versions.max}", "bold")
    known = list(versions.num_rows)
    size = -(-len(known) // MAX_VERSIONS)
    parts = [known[start : start + size] for start in range(0, len(known), size)]
    _print_bars(
        [
            (f"{part[0]}" if len(part) == 1 else f"{part[0]} to {part[-1]}", sum(versions.num_rows[v] for v in part))
            for part in parts
        ],
        console,
    )


def _print_numbers(title: str, numbers: Numbers, console: Console) -> None:
    _line(console, "")
    _line(console, f"{title}: mean {numbers.mean:.4g}, std {numbers.std:.4g}", "bold")
    quantiles = ", ".join(f"{float(share):.0%} {value:.4g}" for share, value in numbers.quantiles.items())
    _line(console, f"min {numbers.min:.4g}, {quantiles}, max {numbers.max:.4g}")
    _print_bars([(_label(bar), bar.count) for bar in numbers.bars], console)


def _label(bar: Bar) -> str:
    return f"{bar.low:.4g}" if bar.low == bar.high else f"{bar.low:.4g} to {bar.high:.4g}"


def _print_bars(bars: list[tuple[str, int]], console: Console) -> None:
    highest = max(count for _, count in bars)
    wide, digits = max(len(label) for label, _ in bars), len(str(highest))
    for label, count in bars:
        bar = "#" * -(-count * WIDEST_BAR // highest)  # rounded up: one row is seen
        _line(console, f"  {label:>{wide}}  {count:>{digits}}  {bar}".rstrip())


def _print_samples(samples: Iterable[SampleRow], console: Console) -> None:
    """One line for each; prompt and response share the room that is left, so that none of them is hidden."""
    rows = [("uid", "reward", "version", "tokens", "prompt", "response")]
    for sample in samples:
        lengths = f"{sample.prompt_length} + {sample.response_length}"
        numbers = (_number(sample.reward), _number(sample.model_version), lengths)
        rows.append((sample.uid, *numbers, _flat(sample.prompt), _flat(sample.response)))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    room = max(console.width - sum(widths[:4]) - 5 * len(GAP), 2 * MIN_TEXT)
    widths[5] = min(widths[5], max(room // 2, room - widths[4]))
    widths[4] = min(widths[4], room - widths[5])
    _line(console, "")
    for row in rows:
        cells = (_cut(cell, width) for cell, width in zip(row, widths, strict=True))
        _line(console, GAP.join(cells).rstrip())


def _cut(text: str, width: int) -> str:
    """Exactly so wide on a terminal."""
    return set_cell_size(text if cell_len(text) <= width else set_cell_size(text, width - 3) + "...", width)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(text: str | None) -> str:
    """In one line, without what a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in " ".join((text or "-").split()))


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True, emoji=False)
