"""Snapshots: what is written is read back, and nothing altered is believed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from gradloc.manifest import Manifest
from gradloc.snapshot import (
    MicroBatch,
    SnapshotRejected,
    collect_parts,
    open_snapshot,
    write_manifest,
    write_part,
    write_weights,
)
from gradloc.store import Store, StoreUnavailable, digest
from gradloc.tensor_file import PIECE_BYTES, pieces


def micro_batch() -> MicroBatch:
    return MicroBatch(
        ids_BT=torch.arange(8).reshape(2, 4),
        mask_BR=torch.tensor([[True, False], [True, True]]),
        logp_BR=-torch.ones(2, 2),
        coefficient_BR=torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]]),
        uids=("p1", "p2"),
        temperature=0.7,
    )


@pytest.fixture
def snapshot_dir(tmp_path: Path) -> Path:
    store = Store(str(tmp_path))
    part = write_part(store, 0, (micro_batch(),), 0.5)
    files = write_weights(store, {"w": torch.ones(3)})
    write_manifest(
        store,
        Manifest(
            run_id="r",
            attempt=0,
            step=1,
            created_at=0.0,
            world_size=1,
            grad_norm=float("inf"),
            tied_weights={"v": "w"},
            parts=(part,),
            files=files,
        ),
    )
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | changes))


def test_what_was_written_is_read_back(snapshot_dir: Path) -> None:
    snapshot = open_snapshot(str(snapshot_dir))
    (read,) = snapshot.micro_batches(0)
    written = micro_batch()
    assert torch.equal(read.coefficient_BR, written.coefficient_BR) or torch.equal(
        read.coefficient_BR.nan_to_num(7.0), written.coefficient_BR.nan_to_num(7.0)
    )
    assert read.uids == written.uids and read.temperature == 0.7 and read.first_position == 2
    assert snapshot.manifest.grad_norm == float("inf")
    weights = snapshot.weights()
    assert torch.equal(weights["v"], weights["w"])


def test_tensors_of_every_kind_are_those_that_the_library_reads(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    written = {f"of {kind}": torch.randint(0, 2, (3, 5), generator=generator).to(kind) for kind in kinds}
    written |= {
        "turned": torch.randn(4, 3, generator=generator).T,
        "a number": torch.tensor(float("nan")),
        "none": torch.zeros(0, 2),
        "complex": torch.randn(2, 2, dtype=torch.complex64, generator=generator),
        "of several pieces": torch.arange(PIECE_BYTES // 8 + 3),
        "with a gradient": torch.ones(2, requires_grad=True),
    }
    stored = Store(str(tmp_path)).write_pieces("x", pieces(written))
    data = (tmp_path / "x").read_bytes()
    assert stored == digest(data)
    read = load(data)
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_a_number_format_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is of torch\.complex128; expected one of torch\.float64"):
        list(pieces({"w": torch.zeros(1, dtype=torch.complex128)}))


def test_a_write_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreUnavailable, match="cannot write x to the store: No space left"):
        Store(str(tmp_path)).write_pieces("x", broken())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["batch/rank-0.safetensors", "weights/model.safetensors"])
@pytest.mark.parametrize(("damage", "said"), [("cut", "truncated"), ("flip", "altered"), ("gone", "missing")])
def test_damaged_files_are_refused_by_name(snapshot_dir: Path, name: str, damage: str, said: str) -> None:
    path = snapshot_dir / name
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-3])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    snapshot = open_snapshot(str(snapshot_dir))
    with pytest.raises(SnapshotRejected, match=said):
        snapshot.micro_batches(0)
        snapshot.weights()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "unknown version 2, expected 1"),
        ({"version": None}, "unknown version"),
        ({"format": "zip"}, "not of format"),
        ({"world_size": 3}, "expected one of each of 3 ranks"),
        ({"world_size": "many"}, "world_size"),
        ({"parts": []}, "expected one of each"),
    ],
)
def test_a_manifest_of_another_kind_is_refused_with_the_reason(
    snapshot_dir: Path, changes: dict[str, object], said: str
) -> None:
    edit_manifest(snapshot_dir, **changes)
    with pytest.raises(SnapshotRejected, match=said):
        open_snapshot(str(snapshot_dir))


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000, "\x00"])
def test_a_manifest_that_is_no_manifest_is_refused(snapshot_dir: Path, text: str) -> None:
    (snapshot_dir / "manifest.json").write_text(text)
    with pytest.raises(SnapshotRejected):
        open_snapshot(str(snapshot_dir))


def test_without_a_manifest_there_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(SnapshotRejected, match="no snapshot at"):
        open_snapshot(str(tmp_path))


def test_names_cannot_leave_the_snapshot(snapshot_dir: Path) -> None:
    document = json.loads((snapshot_dir / "manifest.json").read_text())
    (record,) = document["parts"][0]["files"].values()
    document["parts"][0]["files"] = {"../../secret": record}
    (snapshot_dir / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(SnapshotRejected, match="leaves the snapshot"):
        open_snapshot(str(snapshot_dir)).micro_batches(0)


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_part(store, 0, (micro_batch(),), 1.0)
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        collect_parts(store, 2, timeout_s=0.1)
