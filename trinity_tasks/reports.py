"""Pictures and tables about a run, as bytes and text: reward curve, histogram, rollouts. Pure functions.

Does not own: where they go (`tracking.py`, the flow's summary).
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

History = Mapping[str, Sequence[tuple[int, float]]]
"""Name of a curve -> (step, value) by step."""

SMOOTHED_FROM = 20
"""Points from which a curve gets a running mean."""


def reward_curve_png(history: History, title: str = "reward") -> bytes:
    """A picture of every curve by train step, 900 x 500 pixels. Long curves are faint, with their running mean on top.

    Values that are not finite are left out. Two calls with the same arguments return the same bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no global state, any thread
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for number, (name, points) in enumerate(history.items()):
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        steps, values = [step for step, _ in finite], [value for _, value in finite]
        color = f"C{number % 10}"
        if len(finite) < SMOOTHED_FROM:
            axes.plot(steps, values, color=color, marker="o", markersize=4, label=name)
        else:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, running_mean(values), color=color, linewidth=2, label=name)
    axes.set(xlabel="train step", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if history:
        axes.legend(frameon=False)
    picture = io.BytesIO()
    canvas.print_png(picture, metadata={"Software": None})
    return picture.getvalue()


def histogram_png(bars: Sequence[tuple[float, float, int]], title: str) -> bytes:
    """A picture of (low, high, count), 900 x 500 pixels; a bar whose ends are equal stands for one value.

    Two calls with the same arguments return the same bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no global state, any thread
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    if bars:
        lows = [low for low, _, _ in bars]
        gaps = [after - before for before, after in pairwise(lows)]
        widths = [high - low or min(gaps, default=1.0) * 0.6 for low, high, _ in bars]
        centers = [(low + high) / 2 for low, high, _ in bars]
        axes.bar(centers, [count for _, _, count in bars], width=widths, edgecolor="white")
    axes.set(xlabel=title, ylabel="rows")
    axes.grid(alpha=0.3, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    canvas.print_png(picture, metadata={"Software": None})
    return picture.getvalue()


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours, over about a tenth of the curve; fewer neighbours at the ends."""
    half = max(len(values) // 20, 1)
    windows = [values[max(index - half, 0) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def rollout_rows(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[dict[str, str | float | None]]:
    """Rollouts (prompt, response, reward) of the same tasks side by side, for a table; paired by their prompt."""
    later = {str(row["prompt"]): row for row in after}
    pairs = [(row, later.pop(str(row["prompt"]), None)) for row in before]
    pairs += [(None, row) for row in after if str(row["prompt"]) in later]
    return [
        {
            "prompt": str((first or second or {})["prompt"]),
            "before": str(first["response"]) if first else None,
            "reward_before": _reward(first),
            "after": str(second["response"]) if second else None,
            "reward_after": _reward(second),
        }
        for first, second in pairs
    ]


def _reward(row: Mapping[str, Any] | None) -> float | None:
    return None if row is None or row["reward"] is None else float(row["reward"])


def rollouts_markdown(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """Rollouts before and after as a Markdown table."""
    lines = ["| prompt | before | reward | after | reward |", "|---|---|---:|---|---:|"]
    for row in rollout_rows(before, after):
        lines.append(f"| {' | '.join(_markdown_cell(value) for value in row.values())} |")
    return "\n".join(lines) + "\n"


def rollouts_html(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], title: str) -> str:
    """Rollouts before and after as a page of its own, without scripts or outside resources."""
    heads = ("prompt", "before", "reward", "after", "reward")
    body = [
        "<tr>" + "".join(f"<td>{html.escape(_text(value))}</td>" for value in row.values()) + "</tr>"
        for row in rollout_rows(before, after)
    ]
    style = (
        "body{font:15px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:.4em .7em;text-align:left;vertical-align:top;white-space:pre-wrap}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n<h1>{html.escape(title)}</h1>\n<table>\n"
        f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>\n" + "\n".join(body) + "\n</table></html>\n"
    )


def _text(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:g}"


def _markdown_cell(value: str | float | None) -> str:
    text = html.escape(_text(value), quote=False).replace("\\", "\\\\")
    for character in "|`*_[]":
        text = text.replace(character, f"\\{character}")
    return "<br>".join(text.splitlines())
