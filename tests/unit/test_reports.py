"""Reports: what a picture shows and what a table says, read back from the bytes and the text."""

import io
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trinity_tasks.reports import reward_curve_png, rollout_rows, rollouts_html, rollouts_markdown, running_mean


def pixels(picture: bytes) -> npt.NDArray[np.float32]:
    from matplotlib.image import imread

    return imread(io.BytesIO(picture), format="png")


def blue(picture: bytes) -> npt.NDArray[np.intp]:
    """(row, column) of the pixels in the full colour of the first curve."""
    found = pixels(picture)[..., :3]
    return np.argwhere(np.abs(found - np.array([0x1F, 0x77, 0xB4]) / 255).max(-1) < 0.02)


def test_curve_rises_from_the_lower_left_to_the_upper_right() -> None:
    picture = reward_curve_png({"reward": [(step, step / 100) for step in range(101)]})
    assert pixels(picture).shape == (500, 900, 4)
    drawn = blue(picture)
    drawn = drawn[drawn[:, 1] > 150]  # the legend is on the left
    left, right = drawn[drawn[:, 1].argmin()], drawn[drawn[:, 1].argmax()]
    assert left[0] - right[0] > 250
    slope, _ = np.polyfit(drawn[:, 1], drawn[:, 0], 1)
    assert slope == pytest.approx(-(left[0] - right[0]) / (right[1] - left[1]), rel=0.05)


def test_same_history_same_bytes_and_gaps_are_left_out() -> None:
    points = [(step, math.sin(step)) for step in range(15)]
    assert reward_curve_png({"reward": points}) == reward_curve_png({"reward": points})
    assert reward_curve_png({"reward": [*points, (15, math.nan), (16, math.inf)]}) == reward_curve_png(
        {"reward": points}
    )
    assert len(blue(reward_curve_png({}))) == 0


def test_running_mean_by_hand() -> None:
    assert running_mean([0.0, 3.0, 6.0, 0.0]) == [1.5, 3.0, 3.0, 3.0]
    spike = [0.0] * 60
    spike[30] = 7.0
    assert running_mean(spike)[26:35] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


BEFORE = [
    {"prompt": "spell cat", "response": "c|a", "reward": 0.0},
    {"prompt": "spell <b>", "response": "x\ny", "reward": 0.25},
]
AFTER = [
    {"prompt": "spell <b>", "response": "b", "reward": 1.0},
    {"prompt": "spell new", "response": "n*", "reward": 1.0},
]


def test_rollouts_are_paired_by_prompt() -> None:
    assert [tuple(row.values()) for row in rollout_rows(BEFORE, AFTER)] == [
        ("spell cat", "c|a", 0.0, None, None),
        ("spell <b>", "x\ny", 0.25, "b", 1.0),
        ("spell new", None, None, "n*", 1.0),
    ]


def test_markdown_keeps_its_columns_whatever_the_model_wrote() -> None:
    lines = rollouts_markdown(BEFORE, AFTER).splitlines()
    assert lines[2:] == [
        "| spell cat | c\\|a | 0 |  |  |",
        "| spell &lt;b&gt; | x<br>y | 0.25 | b | 1 |",
        "| spell new |  |  | n\\* | 1 |",
    ]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in lines)


def test_html_shows_text_as_text() -> None:
    cells: list[str] = []

    class Cells(HTMLParser):
        inside = False

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag in {"html", "meta", "title", "style", "h1", "table", "tr", "th", "td"}
            if tag == "td":
                self.inside = True
                cells.append("")

        def handle_endtag(self, tag: str) -> None:
            self.inside = self.inside and tag != "td"

        def handle_data(self, data: str) -> None:
            if self.inside:
                cells[-1] += data

    Cells().feed(rollouts_html(BEFORE, AFTER, title="<script>"))
    assert cells[5:10] == ["spell <b>", "x\ny", "0.25", "b", "1"]
    assert len(cells) == 15


def test_module_needs_no_matplotlib_until_a_picture_is_drawn() -> None:
    code = (
        "import sys, trinity_tasks.reports; print([m for m in ('matplotlib', 'prefect', 'mlflow') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout.strip() == "[]"
