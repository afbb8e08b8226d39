"""Everything of ours that reads what others wrote, as functions of bytes: each reads, or says why not in its own error.

A seed is an input that is read. Whatever else comes out of `read` is a crash.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import torch
from safetensors.torch import save

from gradloc.checks.documents import DocumentRejected, check_document, read_document
from gradloc.checks.log_series import read_log
from gradloc.manifest import Manifest, RankPart
from gradloc.snapshot import MANIFEST, MicroBatch, SnapshotRejected, open_snapshot, write_part
from gradloc.store import Store
from gradloc.trace_replay import files
from gradloc_detector import state as checkpoints
from gradloc_proto import codec

TESTS = Path(__file__).parents[1]
URL = "memory://fuzz/run/0/7"
_LAYERS = ("data", "reward", "policy", "gradient", "optimizer")


@dataclass(frozen=True)
class Parser:
    """`read` raises one of `rejections`, or reads; anything else is a crash."""

    name: str
    read: Callable[[bytes], object]
    rejections: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


def parsers(folder: Path) -> list[Parser]:
    """All of them; what reads files finds each input in `folder`."""
    return [
        Parser("codec", codec.decode, (codec.MessageRejected,), _golden()),
        Parser("manifest", _read_manifest, (SnapshotRejected,), [_manifest().encode()]),
        Parser("safetensors", _read_tensors, (SnapshotRejected,), _tensors()),
        Parser("trace log", _of_file(folder / "trace.log", files.read), (ValueError,), _logs()),
        Parser("trace table", _of_file(folder / "trace.csv", files.read), (ValueError,), _tables()),
        Parser("trainer state", _of_file(folder / "state.json", files.read), (ValueError,), _states()),
        Parser("events file", _of_file(folder / "events.out", files.read), (ValueError,), [_events()]),
        Parser("console log", _of_file(folder / "console.log", read_log), (ValueError,), _logs()),
        Parser("console table", _of_file(folder / "console.csv", read_log), (ValueError,), _tables()),
        Parser("console state", _of_file(folder / "console.json", read_log), (ValueError,), _states()),
        Parser("document", _of_file(folder / "document.json", _read_layers), (DocumentRejected,), _documents()),
        Parser("checkpoint", checkpoints.load, (checkpoints.StateRejected,), [_checkpoint()]),
    ]


def _of_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def of(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return of


def _golden() -> list[bytes]:
    return [path.read_bytes().strip() for path in sorted((TESTS / "proto" / "golden").rglob("*.json"))]


# --- snapshots ---------------------------------------------------------------------------------------


def _batch() -> MicroBatch:
    ids_BT = torch.arange(10).reshape(2, 5)
    ones_BR = torch.ones(2, 3)
    return MicroBatch(ids_BT, ones_BR.bool(), -ones_BR, ones_BR, rollout_logp_BR=-ones_BR, uids=("a", "b"))


def _manifest() -> str:
    store = Store(URL)
    part = write_part(store, 0, (_batch(),), 1.0)
    manifest = Manifest(
        run_id="run", attempt=0, step=7, created_at=1.0, world_size=1, grad_norm=4.0, layer_norms={"layers.0.mlp": 2.0},
        limit=2.0, model_config_hf={"model_type": "qwen3", "vocab_size": 8}, parts=(part,), files={},
    )  # fmt: skip
    return manifest.model_dump_json()


def _read_manifest(data: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"/fuzz/run/0/7/{MANIFEST}", data)
    snapshot = open_snapshot(URL)
    for part in snapshot.manifest.parts:
        snapshot.micro_batches(part.rank)
    if snapshot.manifest.files:
        snapshot.weights()


def _tensors() -> list[bytes]:
    store = Store(URL)
    write_part(store, 0, (_batch(),), 1.0)
    kinds = {"a": torch.zeros(2, 2, dtype=torch.bfloat16), "b": torch.zeros(0), "c": torch.tensor(1.0)}
    return [store.read("batch/rank-0.safetensors", bytes_max=10_000), save(kinds)]


def _read_tensors(data: bytes) -> None:
    """As batch and as weights; whoever altered the file has altered the manifest's digest as well."""
    record = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    batch, weights = "batch/rank-0.safetensors", "weights/model.safetensors"
    part = RankPart.model_validate(
        {"rank": 0, "grad_factor": 1.0, "micro_batches": [{"uids": ["a", "b"]}], "files": {batch: record}}
    )
    manifest = Manifest(
        run_id="run", attempt=0, step=7, created_at=1.0, world_size=1, grad_norm=4.0, parts=(part,),
        files={weights: part.files[batch]},
    )  # fmt: skip
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/fuzz/run/0/7/{batch}", data)
    memory.pipe_file(f"/fuzz/run/0/7/{weights}", data)
    memory.pipe_file(f"/fuzz/run/0/7/{MANIFEST}", manifest.model_dump_json().encode())
    snapshot = open_snapshot(URL)
    snapshot.weights()
    snapshot.micro_batches(0)


# --- logs --------------------------------------------------------------------------------------------


def _logs() -> list[bytes]:
    trl = "\n".join(
        f"{{'loss': {0.1 * n:.3f}, 'grad_norm': {1.0 + n / 7:.3f}, 'learning_rate': 1e-06, 'reward': 0.5, 'kl': nan, "
        f"'epoch': 0.{n}}}"
        for n in range(6)
    )
    verl = "\n".join(
        f"\x1b[36m(TaskRunner pid=12)\x1b[0m step:{n} - actor/grad_norm:{1 + n} - actor/pg_loss:np.float64(0.{n}) - "
        f"critic/score/mean:0.5 - actor/ppo_kl:inf"
        for n in range(6)
    )
    lines = "\n".join(json.dumps({"step": n, "grad_norm": 1.0 + n, "loss": 0.5}) for n in range(6))
    text = (
        "2026-11-30 04:00:01 INFO step 3: loss=0.5 grad_norm=4.1\r 10%|##| 1/10 [00:01<00:09, loss=0.4, grad_norm=2.0]"
    )
    crash = (
        'Traceback (most recent call last):\n  File "train.py", line 3\ntorch.cuda.OutOfMemoryError: CUDA out of memory'
    )
    bars = "| step | loss | grad_norm |\n| 1 | 0.5 | 3.2 |\n| 2 | 0.4 | 3.1 |"
    return [one.encode() for one in (trl, verl, lines, f"{text}\n{crash}\n{bars}\n", f"{text}\n{trl}\n{crash}")]


def _tables() -> list[bytes]:
    plain = "step,loss,grad_norm,reward\n" + "\n".join(f"{n},0.{n},{1.0 + n},0.5" for n in range(6))
    export = '"Step","run - train/grad_norm","run - train/grad_norm__MIN"\n' + "\n".join(
        f'"{n}","{n}","nan"' for n in range(6)
    )
    return [plain.encode(), export.encode(), plain.replace(",", "\t").encode()]


def _states() -> list[bytes]:
    rows = [{"step": n, "grad_norm": 1.0 + n, "loss": 0.5, "learning_rate": 1e-6, "reward": 0.1} for n in range(6)]
    return [json.dumps({"global_step": 6, "log_history": rows}).encode(), json.dumps(rows).encode()]


def _events() -> bytes:
    def field(number: int, wire: int, value: bytes) -> bytes:
        return bytes([number << 3 | wire]) + value

    def block(number: int, value: bytes) -> bytes:
        return field(number, 2, bytes([len(value)]) + value)

    def frame(event: bytes) -> bytes:
        return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)

    found = frame(field(1, 1, bytes(8)) + block(3, b"brain.Event:2"))
    for step in range(4):
        scalar = block(1, block(1, b"train/grad_norm") + field(2, 5, struct.pack("<f", 1.0 + step)))
        found += frame(field(1, 1, bytes(8)) + field(2, 0, bytes([step])) + block(5, scalar))
    return found


# --- documents and checkpoints -----------------------------------------------------------------------


def _documents() -> list[bytes]:
    made = [
        {"rewards": [0.1, 1.0, float("nan")], "groups": ["a", "a", "b"], "bounds": [0, 1], "lengths": [3, 4, 5]},
        {"advantages": [1.0, -1.0, 0.0], "groups": ["a", "a", "b"], "estimator": "grpo"},
        {
            "logp": [[-0.1, -0.2]],
            "rollout_logp": [[-0.1, -9.0]],
            "mask": [[1, 1]],
            "learning_rate": 1e-6,
            "grad_norm": 3.0,
        },
        {
            "layer_norms": {"layers.0.mlp": 1.0},
            "healthy_layer_norms": {"layers.0.mlp": 0.5},
            "coefficients": [0.1, 1e9],
        },
        {"loss": 0.5, "kl": -0.1, "entropy": 3.0, "clip_fraction": 0.5, "ratio": [1.0, 2.0], "lr": 1e-3},
        {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "attention_mask": [[1, 1, 1]], "labels": [[-100, 2, 3]]},
        {"per_token_log_ratio": 0.1, "num_tokens": 2000, "log_ratio_abs_mean": 0.2, "num_updates": 0},
    ]
    return [json.dumps(one).encode() for one in made]


def _read_layers(path: Path) -> None:
    """By every layer; of one that finds nothing to look at the rejection is as good as an answer."""
    document = read_document(path)
    for layer in _LAYERS:
        try:
            check_document(layer, document)
        except DocumentRejected as error:
            assert_clear(error)


def _checkpoint() -> bytes:
    from gradloc_detector.fold import fold
    from gradloc_detector.policy import DEFAULT_POLICY
    from gradloc_proto.messages import RunStarted, StepObserved

    state = checkpoints.initial_state("run")
    told = [RunStarted(run_id="run", ts=1.0)]
    told += [
        StepObserved(run_id="run", ts=1.0 + n, step=n, grad_norm=1.0 if n != 40 else 90.0, layer_norms={"a": 1.0})
        for n in range(44)
    ]
    for message in told:
        state, _ = fold(state, message, DEFAULT_POLICY)
    return checkpoints.dump(state)


# --- what a rejection must be ------------------------------------------------------------------------

REASON_MAX = 1_200


def assert_clear(error: Exception) -> None:
    """One line that says something, fit for a terminal and a log."""
    text = str(error)
    assert text.strip(), f"{type(error).__name__} without a reason"
    assert len(text) <= REASON_MAX, f"a reason of {len(text)} characters: {text[:200]}"
    assert text.isprintable(), f"not fit for a terminal: {text[:200]!r}"
