"""Every benchmark, by name: the function that runs it, the keys it yields, and the bound each key is held to.

A benchmark is a function without arguments that returns numbers, its keys and raw figures; `single.py` calls it in a
process of its own. Torch-free, and imports nothing that it lists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A key of bench.json and its bound; neither bound given: reported only."""

    key: str
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        """The bound, in words."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    def holds(self, value: float) -> bool:
        """Whether a measured value respects the bound; NaN respects none."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lives and what it measures."""

    function: str
    """module:function"""
    measures: tuple[Measure, ...]
    timeout_s: float = 900.0


BENCHMARKS: dict[str, Benchmark] = {
    "train_step_vs_trl": Benchmark(
        "tests.benchmarks.train_step:heavy_tailed",
        (
            Measure("train_step_vs_trl", "x", at_least=5),
            Measure("train_step_memory_vs_trl", "x", at_most=1 / 3),
        ),
    ),
    "train_step_vs_trl_uniform": Benchmark(
        "tests.benchmarks.train_step:uniform", (Measure("train_step_vs_trl_uniform", "x"),)
    ),
    "train_step_vs_trl_tiny": Benchmark(
        "tests.benchmarks.train_step:tiny", (Measure("train_step_vs_trl_tiny", "x", at_least=3),)
    ),
    "loss_share_of_step": Benchmark(
        "tests.benchmarks.loss_share:loss_share", (Measure("loss_share_of_step", "x", at_most=0.03),)
    ),
    "sampler_vs_generate": Benchmark(
        "tests.benchmarks.sampling:sampler_vs_generate", (Measure("sampler_vs_generate", "x", at_least=2),)
    ),
    "orchestration": Benchmark(
        "tests.benchmarks.orchestration:orchestration",
        (
            Measure("orchestration_ms_per_step", "ms", at_most=12),
            Measure("orchestration_growth", "x", at_most=1.1),
            Measure("server_cpu_ms_per_step", "ms", at_most=25),
            Measure("rss_kb_per_step", "KB", at_most=1),
        ),
    ),
    "buffer_vs_sqlite": Benchmark(
        "tests.benchmarks.buffer_speed:buffer_speed",
        (
            Measure("decode_experiences_per_s", "rows", at_least=40_000),
            Measure("encode_experiences_per_s", "rows", at_least=20_000),
            Measure("buffer_read_vs_sqlite", "x"),
            Measure("buffer_write_vs_sqlite", "x"),
            Measure("buffer_bytes_vs_sqlite", "x"),
        ),
    ),
    "buffer_1m_vs_10k": Benchmark(
        "tests.benchmarks.buffer_scale:buffer_scale", (Measure("buffer_1m_vs_10k", "x", at_most=1.2),)
    ),
    "buffer_rss_mb": Benchmark(
        "tests.benchmarks.buffer_scale:buffer_memory", (Measure("buffer_rss_mb", "MB", at_most=500),)
    ),
    "startup_s": Benchmark("tests.benchmarks.startup:startup", (Measure("startup_s", "s", at_most=15),)),
}


def select(names: list[str]) -> dict[str, Benchmark]:
    """The benchmarks of these names, where a key stands for the benchmark that yields it; all for no names.

    Raises KeyError for an unknown name.
    """
    known = {name: name for name in BENCHMARKS}
    known |= {measure.key: name for name, benchmark in BENCHMARKS.items() for measure in benchmark.measures}
    if unknown := [name for name in names if name not in known]:
        raise KeyError(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = {known[name] for name in names} if names else set(BENCHMARKS)
    return {name: benchmark for name, benchmark in BENCHMARKS.items() if name in chosen}
