"""The driver: a snapshot's URL in, a finding out. Knows no Ray and no Redis."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradloc.fidelity import StepFacts, fidelity_of, healthy_error_of
from gradloc.localization import Progress, Strategy, localize
from gradloc.manifest import Manifest
from gradloc.policy import Meter, PlacedBatch, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import Snapshot, SnapshotRejected, open_snapshot
from gradloc.split import Split
from gradloc.store import Store
from gradloc.weight_files import WeightFiles, of_checkpoint, of_snapshot
from gradloc.weights_elsewhere import Fingerprint, is_same, read_checkpoint
from gradloc_localizer.kept_probes import KeptProbes
from gradloc_localizer.model_source import ModelRejected, build_model, dtype_of
from gradloc_localizer.sharing import Alone, Replicas, shared
from gradloc_localizer.split_model import build_split_model
from gradloc_proto import __version__
from gradloc_proto.messages import Finding

_log = logging.getLogger("gradloc.localizer")
NUM_THREADS = 2  # a spare machine is shared with other jobs; small models gain nothing from more


@dataclass(frozen=True)
class Options:
    """How to localize. `limit`: instead of the snapshot's own. `device`: as torch names it, or "auto".

    reference: URL of a healthy step's snapshot of the same run; its replay says how well replays of the run match.
    weights: URL of a checkpoint, for a snapshot that holds no weights. checkpoints: places (URLs that theirs must begin
    with) from which a snapshot may name one itself.
    num_positions: of the culprit's sequence that the finding shows; None: as many as a message should hold.
    num_replicas: of the model, this process among them; more than one needs Ray (`replicas`). probes: URL of a store
    where answers are kept while a localization runs, so that one that was killed goes on where it was. num_processes:
    that hold the model together; with more than one, `explain` runs in each of them (`split_processes`).
    """

    strategy: Strategy = "attribution"
    limit: float | None = None
    allowed_factories: Collection[str] = ()
    device: str = "auto"
    num_threads: int = NUM_THREADS
    reference: str | None = None
    weights: str | None = None
    checkpoints: Collection[str] = ()
    num_positions: int | None = None
    num_replicas: int = 1
    probes: str | None = None
    num_processes: int = 1


MakeReplicas = Callable[[str, Options], contextlib.AbstractContextManager[Replicas]]


def explain(
    url: str,
    options: Options,
    on_progress: Progress = lambda _stage, _fraction: None,
    replicas: MakeReplicas = lambda _url, _options: contextlib.nullcontext(Alone()),
) -> tuple[Manifest, Finding]:
    """Open the snapshot, rebuild its step and explain it.

    replicas: makes those beside this process, where more than one is wanted. Kept probes stay: `forget_probes`.
    Raises SnapshotRejected, ModelRejected, ValueError (a store's URL) or StoreUnavailable.
    """
    torch.set_num_threads(options.num_threads)
    on_progress("opening", 0.0)
    snapshot = open_snapshot(url)
    manifest = snapshot.manifest
    weights = _weights_elsewhere(manifest, options)
    policy, batches = rebuilt(snapshot, options, lambda: on_progress("rebuilding", 0.05), weights)
    facts = facts_of(manifest, options.limit)
    if weights is not None and _is_of(manifest.weights_fingerprint, weights):
        facts = replace(facts, weights="before-update")
    del weights

    def healthy_error() -> float | None:
        return None if options.reference is None else _healthy_error(options.reference, manifest, options)

    def elsewhere() -> float | None:
        device = other_device(options.device)
        if device is None or policy.split is not None:
            return None
        other, placed = rebuilt(snapshot, replace(options, device=device))
        return replay(other, placed, coefficients_of(placed)).gradient.norm

    with contextlib.ExitStack() as stack:
        if options.num_replicas > 1 or options.probes is not None:
            others = stack.enter_context(replicas(url, options)) if options.num_replicas > 1 else Alone()
            kept = None if options.probes is None else KeptProbes(_probes_of(options.probes, manifest))
            shared(policy, batches, _identity(manifest, options, policy.split), kept, others)
        finding = localize(
            policy,
            batches,
            facts,
            strategy=options.strategy,
            texts=texts_of(snapshot),
            on_progress=on_progress,
            healthy_error=healthy_error,
            num_positions=options.num_positions,
            elsewhere=elsewhere,
        )
    on_progress("done", 1.0)
    return manifest, finding


def forget_probes(url: str, manifest: Manifest) -> None:
    """Removes what was kept of this step: its finding is told. Raises StoreUnavailable or ValueError."""
    _probes_of(url, manifest).remove_all()


def _probes_of(url: str, manifest: Manifest) -> Store:
    return Store(url).child(manifest.run_id, manifest.attempt, manifest.step)


def _identity(manifest: Manifest, options: Options, split: Split | None) -> str:
    """Of the step and of what computes it: another release of torch gives other last bits, another process of a split
    has another part."""
    of = [] if split is None else [split.rank, split.size]
    said = json.dumps([manifest.model_dump_json(), options.weights, torch.__version__, __version__, *of])
    return hashlib.sha256(said.encode()).hexdigest()


def rebuilt(
    snapshot: Snapshot,
    options: Options,
    on_open: Callable[[], None] = lambda: None,
    weights: Mapping[str, Tensor] | WeightFiles | None = None,
) -> tuple[Policy, tuple[PlacedBatch, ...]]:
    """A snapshot's step, ready to replay; with these weights, where they were looked up already."""
    manifest = snapshot.manifest
    parts = [snapshot.micro_batches(part.rank) for part in manifest.parts]
    try:
        batches = place([(part, record.grad_factor) for part, record in zip(parts, manifest.parts, strict=True)])
    except ValueError as error:
        raise SnapshotRejected(f"snapshot {snapshot.store.url}: {error}") from None
    on_open()
    weights = _weights_elsewhere(manifest, options) if weights is None else weights
    how: dict[str, Any] = {"allowed_factories": options.allowed_factories, "device": place_of(options.device)}
    split = Split.of_this_process() if options.num_processes > 1 else None
    if split is None:
        assert not isinstance(weights, WeightFiles)
        model = build_model(snapshot, weights=weights, **how)
    else:
        files = weights if isinstance(weights, WeightFiles) else of_snapshot(snapshot)
        model = build_split_model(manifest, files, split, **how)
    _check_ids(snapshot, model, batches)
    meter = Meter(sum(placed.batch.ids_BT.numel() for placed in batches))
    autocast = None if manifest.autocast_dtype is None else dtype_of(manifest.autocast_dtype)
    policy = Policy(model, meter, autocast_dtype=autocast, head=manifest.head)
    try:
        policy.check_inputs(batches)
    except ValueError as error:
        raise SnapshotRejected(f"snapshot {snapshot.store.url}: {error}") from None
    policy.split = split
    return policy, batches


def _is_of(fingerprint: Fingerprint, weights: Mapping[str, Tensor] | WeightFiles) -> bool:
    return weights.is_of(fingerprint) if isinstance(weights, WeightFiles) else is_same(fingerprint, weights)


def _weights_elsewhere(manifest: Manifest, options: Options) -> dict[str, Tensor] | WeightFiles | None:
    """Weights of the checkpoint that stands in for those a snapshot does not hold. A place that only the snapshot names
    is not read. Raises SnapshotRejected."""
    if manifest.weights != "none":
        return None
    place, told = options.weights, manifest.weights_at
    if place is None and told is not None and any(_lies_under(told, one) for one in options.checkpoints):
        place = told
    if place is None:
        return None
    return read_checkpoint(place) if options.num_processes == 1 else of_checkpoint(place)


def _lies_under(url: str, place: str) -> bool:
    return url.startswith(place.rstrip("/") + "/") and ".." not in url.split("/")


def facts_of(manifest: Manifest, limit: float | None = None) -> StepFacts:
    return StepFacts(
        step=manifest.step,
        grad_norm=manifest.grad_norm,
        layer_norms=manifest.layer_norms,
        limit=manifest.limit if limit is None else limit,
        healthy_norm=manifest.healthy_norm,
        healthy_layer_norms=manifest.healthy_layer_norms,
        weights="after-update" if manifest.weights == "none" else manifest.weights,
        rank_norms=manifest.rank_norms,
        metrics=manifest.metrics,
        metrics_usual=manifest.metrics_usual,
        held_at=manifest.held_at,
    )


def _healthy_error(url: str, spiked: Manifest, options: Options) -> float | None:
    """What the replay of the run's healthy step missed by; None, with a line in the log, where it cannot be used."""
    found: tuple[Manifest, Policy, tuple[PlacedBatch, ...]] | None = None
    try:
        snapshot = open_snapshot(url)
        manifest = snapshot.manifest
        if (manifest.run_id, manifest.weights) != (spiked.run_id, "reference"):
            raise SnapshotRejected(f"{url} is not a healthy step of run {spiked.run_id}")
        found = manifest, *rebuilt(snapshot, options)
    except (ValueError, OSError) as error:
        _log.warning("the healthy reference is not used: %s", str(error).split("\n", maxsplit=1)[0][:300])
    if options.num_processes > 1 and not Split.of_this_process().all_have([found is not None])[0]:
        return None  # a replay is a meeting of all
    if found is None:
        return None
    manifest, policy, batches = found
    gradient = replay(policy, batches, coefficients_of(batches)).gradient
    return healthy_error_of(fidelity_of(facts_of(manifest), gradient, policy.grid))


def place_of(name: str) -> str:
    """A device by name or "auto". Raises ModelRejected."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # torch asserts where it was built without CUDA
        raise ModelRejected(f"device {name[:40]!r} is not on this machine; expected cpu, cuda or cuda:0") from None
    return name


def other_device(name: str) -> str | None:
    """Another device of this machine to replay on; None where there is none. The CPU stands in beside a single GPU."""
    device = torch.device(place_of(name))
    if device.type != "cuda":
        return None
    used, count = device.index or 0, torch.cuda.device_count()
    return f"cuda:{(used + 1) % count}" if count > 1 else "cpu"


def _check_ids(snapshot: Snapshot, model: torch.nn.Module, batches: tuple[PlacedBatch, ...]) -> None:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    num_ids = getattr(embedding, "num_embeddings", None)
    if num_ids is None:
        return
    for placed in batches:
        ids_BT: Tensor = placed.batch.ids_BT
        if ids_BT.numel() and not (int(ids_BT.min()) >= 0 and int(ids_BT.max()) < num_ids):
            raise SnapshotRejected(
                f"snapshot {snapshot.store.url}: token ids of rank {placed.rank}, micro-batch {placed.index} lie "
                f"outside the model's vocabulary of {num_ids}; take a new snapshot"
            )


def texts_of(snapshot: Snapshot) -> Callable[[int], str] | None:
    """Text of a token id by the snapshot's tokenizer, or None where it has none. Raises SnapshotRejected."""
    text = snapshot.tokenizer_json()
    if text is None:
        return None
    from tokenizers import Tokenizer

    try:
        json.loads(text)
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
        reason = str(error).split("\n", maxsplit=1)[0][:120]
        raise SnapshotRejected(f"snapshot {snapshot.store.url}: tokenizer.json: {reason}") from None

    def text_of(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False)) if token_id >= 0 else ""

    return text_of
