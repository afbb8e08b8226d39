"""Weights read piece by piece: what the library reads whole, and nothing of a file that is not what it should be."""

import json
import struct

import pytest
import torch
from safetensors.torch import save

from gradloc.perturbation import Cut, stochastic_round
from gradloc.policy import ActivePart
from gradloc.snapshot import MicroBatch, SnapshotRejected
from gradloc.split import Split
from gradloc.store import Store, digest
from gradloc.tensor_file import pieces
from gradloc.weight_files import WeightFiles, of_checkpoint
from gradloc.weights_elsewhere import fingerprint_of

NAME = "model.safetensors"


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(5, 7, generator=generator),
        "b": torch.randn(11, generator=generator).bfloat16(),
        "c": torch.tensor(3.0, dtype=torch.float64),
        "d": torch.zeros(0, 4),
        "e": torch.arange(6).view(2, 3),
    }


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path.as_uri())


def read(files):
    shapes = files.shapes()
    found = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in shapes.items()}
    for name, at, flat in files.pieces():
        found[name].view(-1)[at : at + flat.numel()] = flat
    return found


@pytest.mark.parametrize("written", ["ours", "library"])
@pytest.mark.parametrize("piece", [8, 16 << 20])
def test_pieces_are_the_whole(store, weights, written, piece):
    data = save(weights) if written == "library" else b"".join(bytes(one) for one in pieces(weights))
    store.write(NAME, data)
    known = digest(data)
    files = WeightFiles(store, (NAME,), {NAME: (known.num_bytes, known.sha256)}, {"tied": "a"}, piece_bytes=piece)
    found = read(files)
    assert torch.equal(found.pop("tied"), torch.zeros(5, 7))  # a second name, under which nothing is stored
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in weights.items())
    assert files.is_of(fingerprint_of(weights))
    assert not files.is_of(fingerprint_of(weights | {"a": weights["a"] + 1e-5}))
    assert not files.is_of({})


def raw(header, body=b""):
    encoded = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(encoded)) + encoded + body


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (struct.pack("<Q", 1 << 60), "a header of"),
        (raw(b"[" * 100_000), "cannot be read"),
        (raw({"a": ONE | {"dtype": "F33"}}), "cannot be read"),
        (raw({"a": ONE | {"shape": [-2]}}), "cannot be read"),
        (raw({"a": ONE | {"shape": [3]}}), "cannot be read"),
        (raw({"a": ONE | {"shape": 2}}), "cannot be read"),
        (raw({"a": 3}), "cannot be read"),
        (raw({"a": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "one after the other"),
        (raw({"a": ONE, "b": ONE}, bytes(8)), "one after the other"),
        (raw({"a": ONE}, bytes(7)), "truncated"),
        (raw({"a": ONE}, bytes(9)), "longer than its header says"),
    ],
)
def test_what_is_no_file_of_tensors_is_refused(store, data, says):
    store.write(NAME, data)
    with pytest.raises(SnapshotRejected, match=says):
        read(WeightFiles(store, (NAME,)))


def test_an_altered_or_missing_file_is_refused(store, weights):
    data = save(weights)
    known = digest(data)
    files = WeightFiles(store, (NAME,), {NAME: (known.num_bytes, known.sha256)})
    with pytest.raises(SnapshotRejected, match="missing"):
        files.shapes()
    store.write(NAME, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SnapshotRejected, match="altered"):
        read(files)
    with pytest.raises(SnapshotRejected, match="not stored"):
        WeightFiles(store, (NAME,), {}, {"x": "y"}).shapes()


def test_a_checkpoint_of_several_files(store, weights):
    for name in weights:
        store.write(f"{name}.safetensors", save({name: weights[name]}))
    index = {"weight_map": {name: f"{name}.safetensors" for name in weights}}
    store.write("model.safetensors.index.json", json.dumps(index).encode())
    found = read(of_checkpoint(store.url))
    assert all(torch.equal(found[name], one) for name, one in weights.items())
    store.write("model.safetensors.index.json", b"{}")
    with pytest.raises(SnapshotRejected, match="no index"):
        of_checkpoint(store.url)


@pytest.mark.parametrize("grid", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_within_the_whole_tensor(grid):
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = stochastic_round(values, grid, torch.Generator().manual_seed(2))
    parts = [
        stochastic_round(values[low:high], grid, torch.Generator().manual_seed(2), Cut((9, 5), low), drawn_at_once=13)
        for low, high in ((0, 4), (4, 8), (8, 9), (9, 9))
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("size", [2, 3])
def test_everybody_has_as_many_passes_and_each_row_one_owner(size):
    blank_BR = torch.zeros(4, 6)
    source = MicroBatch(
        ids_BT=torch.arange(28).view(4, 7), mask_BR=blank_BR.bool(), logp_BR=blank_BR, coefficient_BR=blank_BR
    )
    chosen = {0: [0, 1, 2], 1: [3], 2: [0, 2]}
    parts = [(batch, ActivePart(source, source, torch.tensor(rows), 5, False)) for batch, rows in chosen.items()]
    turns = [list(Split(rank, size).turns(parts)) for rank in range(size)]
    assert len({len(own) for own in turns}) == 1
    owned = [(turn.batch, row) for own in turns for turn in own if turn.own for row in turn.part.rows.tolist()]
    assert sorted(owned) == [(batch, row) for batch, rows in chosen.items() for row in rows]
    for turn in (turn for own in turns for turn in own):
        assert turn.part.num_columns == 5
        assert torch.equal(turn.part.batch.ids_BT, source.ids_BT[turn.part.rows, :6])
    assert list(Split(0, size).turns([])) == []
