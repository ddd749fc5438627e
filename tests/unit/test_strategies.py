"""Which rows make a batch: a function of position, step and what was written; groups stay whole, nothing is lost."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.errors import DataError
from engines.experience import Experience
from tests.experience_rows import make_group, make_rows, uids
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import BatchRef, Cursor, PassedRows, Position, RowRange
from trinity_tasks.buffer.epochs import Epochs
from trinity_tasks.buffer.mixed import Mixed
from trinity_tasks.buffer.pool import Decay, Group, NewestFirst, Pooled, Priority, pool_of, state_of
from trinity_tasks.buffer.strategies import Claim, Fifo, Strategy
from trinity_tasks.selectors import SelectorConfig, build_selector
from trinity_tasks.storage import Storage

VECTORS = Path(__file__).parent.parent / "golden" / "vectors"


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "job"))


def write(store: Storage, *shards: Sequence[Experience], writer: str = "a", buffer: str = "main") -> ExperienceWriter:
    new = ExperienceWriter(store, buffer, writer, durable=False, register=False)
    for rows in shards:
        new.write(rows)
    return new


def reader(store: Storage, buffer: str = "main") -> ExperienceReader:
    return ExperienceReader(store, buffer, clock=lambda: 0.0, max_damaged_shards=5)


def stored(position: Position) -> Position:
    """What a commit gives back."""
    cursor = Cursor.from_json(json.loads(json.dumps(position.cursor.to_json())))
    return Position(cursor, json.loads(json.dumps(position.state)))


def taken(strategy: Strategy, claim: Claim) -> list[str]:
    rows = strategy.read(claim.ref)
    assert len(rows) == claim.ref.num_rows
    return uids(rows)


def steps(make: Callable[[], Strategy], num_steps: int, *, resume: bool = False) -> list[Claim]:
    """So many claims, one after another; with `resume`, each by a process that knows only the last position."""
    strategy, position, claims = make(), Position(), list[Claim]()
    for step in range(1, num_steps + 1):
        if resume:
            strategy, position = make(), stored(position)
        claim = strategy.claim(position, step)
        if claim is None:
            break
        claims.append(claim)
        position = claim.after
    return claims


# -- staleness --------------------------------------------------------------------------------------------------------


def test_a_group_with_a_row_that_is_too_old_is_passed_and_listed(store: Storage) -> None:
    """At step 4 with max_staleness 1, versions 2 and up train: staleness is step - 1 - version."""
    groups = [make_group("b", task, 2, version=version) for task, version in enumerate((2, 1, 3, 0))]
    groups[2][1].info["model_version"] = 1  # one row of it is old
    groups.append(make_group("b", 9, 2, version=3))
    write(store, [row for group in groups for row in group])
    strategy = Fifo(reader(store), 4, max_staleness=1)
    claim = strategy.claim(Position(), 4)
    assert claim is not None
    assert taken(strategy, claim) == uids([*groups[0], *groups[4]])
    shard = "experiences/main/a-00000000.parquet"
    tokens = [sum(row.response_length for row in groups[task]) for task in (1, 2, 3)]
    assert claim.passed == tuple(
        PassedRows(shard, 2 * task, 2 * task + 2, "stale", count) for task, count in zip((1, 2, 3), tokens, strict=True)
    )
    assert Fifo(reader(store), 4, max_staleness=3).claim(Position(), 4) is not None
    state = Fifo(reader(store), 6, max_staleness=1).availability(Position(), 4)
    assert (state.available, dict(state.filtered), state.ended) == (4, {"stale": 6}, False)


def test_a_row_without_a_version_cannot_be_judged(store: Storage) -> None:
    rows = make_rows(2, 2)
    del rows[3].info["model_version"]
    write(store, rows)
    with pytest.raises(DataError, match=r"a-00000000.parquet, row 3: it has no info\['model_version'\]"):
        Fifo(reader(store), 4, max_staleness=0).claim(Position(), 1)


# -- what is damaged --------------------------------------------------------------------------------------------------


def test_a_damaged_shard_is_noted_and_passed_and_a_healthy_one_is_not(store: Storage) -> None:
    write(store, make_rows(1, 2, batch=0), make_rows(1, 2, batch=1), make_rows(1, 2, batch=2))
    name = "experiences/main/a-00000001.parquet"
    store.write(name, store.read_bytes(name)[:-20])
    strategy = Fifo(reader(store), 4)
    claim = strategy.claim(Position(), 1)
    assert claim is not None
    assert taken(strategy, claim) == uids([*make_rows(1, 2, batch=0), *make_rows(1, 2, batch=2)])
    assert claim.passed == (PassedRows(name, 0, 0, "damaged"),)
    note: Any = store.read_json("experiences/main/damaged/a-00000001.parquet.json")
    assert (note["shard"], note["num_bytes"]) == (name, store.size(name))
    assert "cannot be read" in note["reason"]
    strict = Fifo(ExperienceReader(store, "main", max_damaged_shards=0), 4)
    with pytest.raises(DataError, match=r"a-00000001.parquet cannot be read.*raise max_damaged_shards \(0; 1 found\)"):
        strict.claim(Position(), 1)


def test_bytes_that_change_on_the_way_are_fetched_again(store: Storage) -> None:
    write(store, make_rows(2, 2))
    broken = [False, True]

    class Flaky(Storage):
        def read_bytes(self, path: str) -> bytes:
            data = super().read_bytes(path)
            return data[:-1] if path.endswith(".parquet") and broken.pop() else data

    strategy = Fifo(ExperienceReader(Flaky(store.url), "main"), 4)
    claim = strategy.claim(Position(), 1)
    assert claim is not None
    assert (claim.passed, store.list("experiences/main/damaged")) == ((), [])


# -- two writers, one name of a group ---------------------------------------------------------------------------------


def test_groups_of_one_name_by_two_writers_stay_two_groups(store: Storage) -> None:
    write(store, make_rows(1, 2), writer="a")
    write(store, make_rows(1, 2), writer="b")
    strategy = Fifo(reader(store), 4)
    claim = strategy.claim(Position(), 1)
    assert claim is not None
    assert [row.eid.tid for row in strategy.read(claim.ref)] == ["0/0", "0/0", "b-00000000:0/0", "b-00000000:0/0"]


# -- pools ------------------------------------------------------------------------------------------------------------


def group(version: int, arrival: int, **fields: Any) -> Group:
    return Group(RowRange("shard", arrival, arrival + 1, "0" * 64), version, 1, **fields)


def test_priorities_are_those_of_the_reference() -> None:
    """queue.json: version - 2 x uses, for 12 combinations and three functions; whether a used group comes back."""
    (case,) = (case for case in json.loads((VECTORS / "queue.json").read_text())["cases"] if case["name"] == "priority")
    assert len(case["outputs"]) == 12
    for expected in case["outputs"]:
        uses = expected["use_count"]
        for name, limit in (("linear_decay", None), ("decay_limit_randomization", 3), ("nolimit", None)):
            priority = Decay(seed=0, use_count_limit=limit)
            (value,) = priority.values([group(expected["model_version"], 0, num_uses=uses)], step=1)
            comes_back = priority.use_count_limit is None or uses < priority.use_count_limit
            assert [value, comes_back] == expected[name]


def test_a_full_pool_is_that_of_the_reference(store: Storage) -> None:
    """queue.json: capacity 3, versions 1 5 3 2 0 5 arrive; it gives 5, 5, 3, of equals the older arrival first."""
    cases = json.loads((VECTORS / "queue.json").read_text())["cases"]
    trace = next(case["outputs"] for case in cases if case["name"].startswith("priority_queue_trace"))
    puts, gets = ([entry for entry in trace if entry["op"] == op] for op in ("put", "get"))
    write(store, *(make_group(entry["i"], 0, 1, version=entry["v"]) for entry in puts))
    claims = steps(lambda: Pooled(reader(store), 1, NewestFirst(), capacity=3), 9)
    batches = [reader(store).read(claim.ref)[0] for claim in claims]
    assert [f"v{row.model_version}i{row.eid.batch}" for row in batches] == [entry["got"] for entry in gets]
    passed = [int(part.shard[-16:-8]) for claim in claims for part in claim.passed]
    assert sorted(passed) == [0, 3, 4]  # arrivals with versions 1, 2 and 0
    assert {part.reason for claim in claims for part in claim.passed} == {"evicted"}


def test_newest_first_takes_each_group_once_and_lists_the_others(store: Storage) -> None:
    writer = write(store, make_rows(3, 2, batch=0, version=0), make_rows(3, 2, batch=1, version=5))
    strategy = Pooled(reader(store), 4, NewestFirst(), capacity=4, max_staleness=5)
    first = strategy.claim(Position(), 6)
    assert first is not None
    assert taken(strategy, first) == uids(make_rows(3, 2, batch=1)[:4])
    assert [(part.start, part.reason) for part in first.passed] == [(0, "evicted"), (2, "evicted")]
    writer.write(make_rows(1, 2, batch=2, version=6))
    second = strategy.claim(stored(first.after), 7)
    assert second is not None  # at step 7 version 0 has become stale
    assert taken(strategy, second) == uids([*make_rows(1, 2, batch=2), *make_rows(3, 2, batch=1)[4:]])
    assert [(part.start, part.reason) for part in second.passed] == [(4, "stale")]
    assert strategy.claim(second.after, 8) is None
    writer.end()
    assert strategy.availability(second.after, 8).ended
    left = [part.stop - part.start for claim in (first, second) for part in (*claim.ref.ranges, *claim.passed)]
    assert sum(left) == 14  # every row that was written


def test_replay_uses_a_group_so_often_and_rests_it(store: Storage) -> None:
    """Decay 2, limit 2, cooldown 1: at each step the highest of version - 2 x uses among those that have rested."""
    write(store, *(make_group(index, 0, 1, version=version) for index, version in enumerate((4, 4, 5))))
    priority = Decay(seed=1, decay=2.0, use_count_limit=2, cooldown_steps=1)
    claims = steps(lambda: Pooled(reader(store), 1, priority, capacity=8), 9)
    batches = [reader(store).read(claim.ref)[0].eid.batch for claim in claims]
    assert batches == [2, 0, 1, 2, 0, 1]
    assert [claim.reused_tokens > 0 for claim in claims] == [False, False, False, True, True, True]
    assert claims[-1].after.state == state_of([])


@pytest.mark.parametrize("priority", [NewestFirst(), Decay(seed=3, sigma=2.0, use_count_limit=3, cooldown_steps=1)])
def test_a_pool_resumes_exactly(store: Storage, priority: Priority) -> None:
    rng = np.random.default_rng(7)
    write(store, *(make_rows(int(rng.integers(1, 6)), 2, batch=b, version=int(rng.integers(0, 9))) for b in range(30)))

    def make() -> Strategy:
        return Pooled(reader(store), 8, priority, capacity=20)

    plain, resumed = steps(make, 12), steps(make, 12, resume=True)
    assert plain == resumed
    assert len(plain) > 4
    for claim in plain:
        assert [row.eid.run for row in make().read(claim.ref)] == [0, 1] * (claim.ref.num_rows // 2)


def test_noise_depends_on_the_step_and_moves_priorities() -> None:
    groups = [group(version, version) for version in range(50)]
    priority = Decay(seed=5, sigma=1.5)
    values = [np.array(priority.values(groups, step)) - np.arange(50) for step in (1, 2)]
    assert abs(np.std(np.concatenate(values)) - 1.5) < 0.3
    assert not np.allclose(values[0], values[1])
    assert priority.values(groups, 1) == priority.values(groups, 1)


def test_a_pool_of_another_strategy_is_refused() -> None:
    with pytest.raises(DataError, match=r"is not a pool .*was sample_strategy changed"):
        pool_of({"selector": {}, "num_taken": 3})


def test_a_group_beyond_the_batch_is_named(store: Storage) -> None:
    write(store, make_group(0, 0, 5))
    with pytest.raises(DataError, match=r"a group in .*a-00000000.parquet has 5 rows, a batch has 4"):
        Pooled(reader(store), 4, NewestFirst(), capacity=4).claim(Position(), 1)


# -- epochs -----------------------------------------------------------------------------------------------------------


def epochs(store: Storage, num_rows: int, group_size: int = 1, **options: Any) -> Epochs:
    config = SelectorConfig(**options.pop("selector", {"selector_type": "shuffle"}))
    return Epochs(
        reader(store),
        num_rows,
        group_size,
        lambda number, features: build_selector(config, number, 42, features),
        feature_keys=config.feature_keys,
        **options,
    )


@pytest.mark.parametrize("last_batch", ["train", "drop"])
@pytest.mark.parametrize("selector_type", ["sequential", "shuffle", "random"])
def test_each_epoch_has_every_group_once(store: Storage, last_batch: Any, selector_type: str) -> None:
    """7 groups of 2 in batches of 3 groups: 3, 3 and 1 or nothing; two epochs; resumed at every step."""
    write(store, make_rows(4, 2, batch=0), make_rows(3, 2, batch=1)).end()
    options = {"total_epochs": 2, "last_batch": last_batch, "selector": {"selector_type": selector_type}}
    claims = steps(lambda: epochs(store, 6, 2, **options), 99, resume=True)
    assert claims == steps(lambda: epochs(store, 6, 2, **options), 99)
    sizes = [claim.ref.num_rows for claim in claims]
    assert sizes == ([6, 6, 2] * 2 if last_batch == "train" else [6, 6] * 2)
    per_epoch = len(sizes) // 2
    for epoch in range(2):
        rows = [row for claim in claims[epoch * per_epoch :][:per_epoch] for row in reader(store).read(claim.ref)]
        assert [row.eid.run for row in rows] == [0, 1] * (len(rows) // 2)
        if selector_type != "random":
            assert len({row.eid.uid for row in rows}) == len(rows) == sum(sizes[:per_epoch])
    assert [claim.reused_tokens > 0 for claim in claims] == [False] * per_epoch + [True] * per_epoch
    end = epochs(store, 6, 2, **options)
    assert end.availability(claims[-1].after, 99).ended


def test_the_golden_order_of_a_shuffle_is_ours(store: Storage) -> None:
    """selectors.json, shuffle, N=8, bs=4: two epochs and a half."""
    write(store, [make_group(0, task, 1)[0] for task in range(8)]).end()
    cases = json.loads((VECTORS / "selectors.json").read_text())["cases"]
    expected = next(case["outputs"]["batches"] for case in cases if case["name"] == "shuffle/N=8/bs=4")
    claims = steps(lambda: epochs(store, 4), len(expected))
    assert [[row.eid.task for row in reader(store).read(claim.ref)] for claim in claims] == expected


def test_easy_to_hard_reads_its_features_from_the_rows(store: Storage) -> None:
    rows = [make_group(0, task, 1)[0] for task in range(4)]
    for row, rate in zip(rows, (0.25, 1.0, 0.5, 0.75), strict=True):
        row.metrics["pass_rate"] = rate
    write(store, rows).end()
    selector = {"selector_type": "easy_to_hard", "feature_keys": ("pass_rate",)}
    claims = steps(lambda: epochs(store, 2, selector=selector), 2)
    assert [row.eid.task for claim in claims for row in reader(store).read(claim.ref)] == [1, 3, 2, 0]
    with pytest.raises(DataError, match=r"hardness is None in its metrics and info"):
        epochs(store, 2, selector={"selector_type": "easy_to_hard", "feature_keys": ("hardness",)}).claim(Position(), 1)


def test_epochs_wait_for_the_end_of_the_data(store: Storage) -> None:
    writer = write(store, make_rows(3, 1))
    strategy = epochs(store, 2)
    assert strategy.claim(Position(), 1) is None
    state = strategy.availability(Position(), 1)
    assert (state.available, state.ended, dict(state.filtered)) == (0, False, {"waiting for the end of data": 3})
    writer.end()
    claim = strategy.claim(Position(), 1)
    assert claim is not None
    assert claim.entered == ("experiences/main/a-00000000.parquet",)
    following = strategy.claim(claim.after, 2)
    assert following is None or following.entered == ()


def test_other_data_than_the_checkpoints_is_refused(store: Storage) -> None:
    writer = write(store, make_rows(4, 1))
    writer.end()
    claim = epochs(store, 2).claim(Position(), 1)
    assert claim is not None
    writer.reopen()
    writer.write(make_rows(1, 1, batch=1))
    writer.end()
    with pytest.raises(Exception, match=r"over 4 tasks, and this job has shuffle over 5"):
        epochs(store, 2).claim(stored(claim.after), 2)


# -- mixed ------------------------------------------------------------------------------------------------------------


def test_two_buffers_keep_their_own_strategies(store: Storage) -> None:
    """Newest first beside an expert's epochs: both states are in one position, and a resume finds them."""
    write(store, *(make_rows(2, 2, batch=b, version=b) for b in range(6)))
    write(store, [make_group("expert", task, 1)[0] for task in range(4)], buffer="experts").end()

    def make() -> Strategy:
        sampled = Pooled(reader(store), 4, NewestFirst(), capacity=99)
        selector = SelectorConfig(selector_type="shuffle")
        experts = Epochs(
            reader(store, "experts"), 3, 1, lambda n, f: build_selector(selector, n, 1, f), last_batch="drop"
        )
        return Mixed(sampled, experts, "experts")

    claims = steps(make, 6, resume=True)
    assert claims == steps(make, 6)
    assert len(claims) == 6
    for index, claim in enumerate(claims):
        rows = make().read(claim.ref)
        assert [row.eid.batch for row in rows] == [5 - index] * 4 + ["expert"] * 3
    assert all(one.after != two.after for one, two in pairwise(claims))
    assert make().claim(claims[-1].after, 7) is None
    assert make().availability(claims[-1].after, 7).available == 0


def test_a_batch_ref_of_two_buffers_is_read_from_both(store: Storage) -> None:
    write(store, make_rows(1, 2))
    write(store, make_rows(1, 1, batch="e"), buffer="experts").end()
    mixed = Mixed(Fifo(reader(store), 2), Fifo(reader(store, "experts"), 1), "experts")
    claim = mixed.claim(Position(), 1)
    assert claim is not None
    assert isinstance(claim.ref, BatchRef)
    assert claim.after.cursor.to_json() == {"a": [1, 0], "experts/a": [1, 0]}
    assert [row.eid.batch for row in mixed.read(claim.ref)] == [0, 0, "e"]
    assert mixed.notes("experiences/experts/a-00000000.parquet") == {}
