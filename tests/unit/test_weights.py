"""WeightStore: a version is complete or absent, and never a mix of two."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import CheckpointError, LeaseLost, StorageError
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage
from trinity_tasks.weights import WeightStore


@pytest.fixture
def store(store_url: str) -> Storage:
    return Storage(store_url)


@pytest.fixture
def stage(tmp_path: Path) -> Callable[[str], Path]:
    def staged(content: str) -> Path:
        folder = tmp_path / f"staged-{content}"
        (folder / "sub").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(f'"{content}"')
        (folder / "sub" / "weights.bin").write_text(content * 100)
        return folder

    return staged


def test_published_weights_come_back(store: Storage, stage: Callable[[str], Path], tmp_path: Path) -> None:
    weights = WeightStore(store)
    assert weights.latest() is None
    for version in (9, 100, 20):
        weights.publish(stage(str(version)), version)
    assert stage("9").exists()
    latest = WeightStore(Storage(store.url)).latest()
    assert latest is not None
    assert latest.version == 100
    weights.fetch(100, tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "weights.bin").read_text() == "100" * 100
    assert weights.versions() == [9, 20, 100]


def test_unfinished_publication_is_invisible(
    store: Storage, stage: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = WeightStore(store)
    weights.publish(stage("1"), 1)
    put_file = Storage.put_file

    def fail(self: Storage, local: Path, path: str, *, move: bool = False) -> object:
        if path.endswith("weights.bin"):
            raise StorageError("the line was cut")
        return put_file(self, local, path, move=move)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put_file", fail)
        with pytest.raises(StorageError, match="the line was cut"):
            weights.publish(stage("2"), 2)
    latest = weights.latest()
    assert latest is not None
    assert latest.version == 1
    with pytest.raises(CheckpointError, match="version_00000002 is not published or was collected; fetch the latest"):
        weights.fetch(2, tmp_path / "back")
    weights.publish(stage("2"), 2)
    weights.fetch(2, tmp_path / "back")


def test_same_weights_again_change_nothing_and_others_replace_them_whole(
    store: Storage, stage: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = WeightStore(store)
    first = weights.publish(stage("a"), 5)
    objects = store.list("weights", recursive=True)
    assert weights.publish(stage("a"), 5) == first
    assert store.list("weights", recursive=True) == objects
    second = weights.publish(stage("b"), 5)
    assert second.prefix != first.prefix
    weights.fetch(5, tmp_path / "b")
    assert (tmp_path / "b" / "config.json").read_text() == '"b"'
    assert store.exists(f"{first.prefix}/config.json")  # a sampler that began with the first can finish


def test_damage_is_found(store: Storage, stage: Callable[[str], Path], tmp_path: Path) -> None:
    weights = WeightStore(store)
    weights.publish(stage("1"), 1)
    manifest = weights.publish(stage("2"), 2)
    path = f"{manifest.prefix}/sub/weights.bin"
    store.write(path, store.read_bytes(path).replace(b"2", b"3", 1))
    with pytest.raises(CheckpointError, match=r"sub/weights\.bin has sha256 .*its bytes changed"):
        weights.fetch(2, tmp_path / "back")
    store.remove(path)
    latest = weights.latest()
    assert latest is not None
    assert latest.version == 1
    store.write("weights/version_00000001/manifest.json", b'{"version": 1}')
    with pytest.raises(CheckpointError, match="is not a manifest of weights"):
        weights.fetch(1, tmp_path / "back")


def test_collect_keeps_the_newest(store: Storage, stage: Callable[[str], Path]) -> None:
    weights = WeightStore(store)
    for version in (1, 2, 3, 4):
        weights.publish(stage(str(version)), version)
    store.remove("weights/version_00000004/manifest.json")
    assert weights.collect(keep=1) == [2, 1]
    assert weights.versions() == [3, 4]
    assert weights.collect(keep=0) == []
    latest = weights.latest()
    assert latest is not None
    assert latest.version == 3


def test_overtaken_process_publishes_nothing(tmp_path: Path, stage: Callable[[str], Path]) -> None:
    store = Storage(str(tmp_path / "store"))
    lease = Lease.acquire(store)
    lease.release()
    with pytest.raises(LeaseLost):
        WeightStore(store, lease).publish(stage("1"), 1)
    assert WeightStore(store).latest() is None
