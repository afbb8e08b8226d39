"""What `gradloc check LAYER` is pointed at: a JSON document, a debug bundle, or a snapshot of a step.

A snapshot holds a step's batch, coefficients, norms and what the trainer said of the step (its metrics); no
optimizer state and no single rewards: those layers say so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradloc.checks import advantages, gradients, losses, optimizer_state, ratios, token_count
from gradloc.checks.batch import check_batch
from gradloc.checks.bundle import is_bundle, read_bundle
from gradloc.checks.documents import DocumentRejected, check_document, read_document
from gradloc.checks.finding import CheckFinding, Report, Skipped, Tally, finding
from gradloc.snapshot import MANIFEST, MicroBatch, Snapshot, open_snapshot


def check_source(layer: str, source: str) -> Report:
    """Check one layer of a source (path or URL). Raises ValueError or OSError with one clear line."""
    path = Path(source)
    if "://" not in source:
        if is_bundle(path):
            return check_document(layer, read_bundle(path))
        if path.is_file():
            return check_document(layer, read_document(path))
        if not path.exists():
            raise DocumentRejected(f"nothing at {source}; expected a JSON document, a bundle or a snapshot's folder")
        if not (path / MANIFEST).is_file():
            raise DocumentRejected(f"{source} holds neither bundle.json nor {MANIFEST}; give the folder that does")
    check = _OF_SNAPSHOT.get(layer)
    if check is None:
        known = ", ".join(_OF_SNAPSHOT)
        raise DocumentRejected(f"a snapshot says nothing of the layer {layer}; expected one of {known}")
    report = check(open_snapshot(source))
    if report is None:
        raise DocumentRejected(f"this snapshot says nothing of the layer {layer}; hand metrics to probe.observe()")
    return report


def _batches(snapshot: Snapshot) -> list[tuple[int, int, MicroBatch]]:
    return [
        (part.rank, index, one)
        for part in snapshot.manifest.parts
        for index, one in enumerate(snapshot.micro_batches(part.rank))
    ]


def _placed(found: Sequence[CheckFinding], rank: int, index: int, tally: Tally, first_position: int = 0) -> None:
    """Add the place in the step; a token counts positions of the whole row, as in findings of a localization."""
    for one in found:
        where: dict[str, int | str] = {"rank": rank, "micro_batch": index, **one.where}
        if isinstance(where.get("token"), int):
            where["token"] = first_position + int(where["token"])
        tally.add(replace(one, where=where))


def _data(snapshot: Snapshot) -> Report:
    tally = Tally()
    batches = _batches(snapshot)
    for rank, index, one in batches:
        tensors = {"ids": one.ids_BT, "loss_mask": one.mask_BR}
        if one.attention_mask_BT is not None:
            tensors |= {"attention_mask": one.attention_mask_BT}
        _placed(check_batch(tensors), rank, index, tally)
    return Report(
        tally.findings(), (Skipped("vocabulary", "no tokenizer is compared"),), {"micro_batches": len(batches)}
    )


def _policy(snapshot: Snapshot) -> Report:
    tally = Tally()
    manifest = snapshot.manifest
    batches = _batches(snapshot)
    skipped = []
    for rank, index, one in batches:
        tokens = ratios.TokenBatch(one.logp_BR, one.mask_BR, one.rollout_logp_BR, one.old_logp_BR)
        _placed(ratios.check_tokens(tokens, grad_norm=manifest.grad_norm), rank, index, tally, one.first_position)
        if one.advantage_BR is not None:
            weight_BR = one.advantage_BR.double() * (one.mask_BR != 0)
            reference_BR = one.rollout_logp_BR if one.rollout_logp_BR is not None else one.old_logp_BR
            if reference_BR is not None:
                weight_BR = weight_BR * (one.logp_BR.double() - reference_BR.double()).exp()
            _placed(token_count.check_coefficients(one.coefficient_BR, weight_BR), rank, index, tally)
    rows = [
        (uid, float(row[mask != 0][0]))
        for _, _, one in batches
        if one.advantage_BR is not None and len(one.uids) == len(one.advantage_BR)
        for uid, row, mask in zip(one.uids, one.advantage_BR, one.mask_BR, strict=True)
        if bool((mask != 0).any())
    ]
    if rows:
        names = [uid for uid, _ in rows]
        whole = min(names.count(name) for name in set(names)) >= 2
        found = advantages.check_advantages(
            [value for _, value in rows], groups=names, estimator="group" if whole else "any"
        )
        for one_found in found:
            tally.add(one_found)
    else:
        skipped.append(Skipped("advantages", "the snapshot has none, or no uids that group them"))
    for one_found in _loss_metrics(snapshot):
        tally.add(one_found)
    return Report(tally.findings(), tuple(skipped), {"micro_batches": len(batches)})


def _metric(snapshot: Snapshot, name: str) -> float | None:
    return snapshot.manifest.metrics.get(name)


def _loss_metrics(snapshot: Snapshot) -> Iterator[CheckFinding]:
    """What the trainer itself measured of the step; how it estimates the KL is not known."""
    loss, kl = _metric(snapshot, "loss"), _metric(snapshot, "kl")
    if loss is not None:
        yield from losses.check_loss_parts({"loss": loss})
    if kl is not None:
        yield from losses.check_kl(kl, estimator="k1")
    entropy, clipped = _metric(snapshot, "entropy"), _metric(snapshot, "clip_fraction")
    if entropy is not None:
        yield from losses.check_entropy(entropy)
    yield from losses.check_clipping(clip_fraction=clipped)


def _reward(snapshot: Snapshot) -> Report | None:
    mean, std = _metric(snapshot, "reward_mean"), _metric(snapshot, "reward_std")
    if mean is None:
        return None
    step = snapshot.manifest.step
    found = []
    if not math.isfinite(mean):
        found.append(finding("reward.not-a-number", f"mean reward is {mean}", {"step": step}))
    elif std == 0.0:
        found.append(finding("reward.constant", f"all rewards of the step are {mean:.6g}", {"step": step}, value=mean))
    left = Skipped("rewards one by one", "a snapshot holds their mean and deviation only")
    return Report(tuple(found), (left,), {"steps": 1})


def _optimizer(snapshot: Snapshot) -> Report | None:
    rate = _metric(snapshot, "lr")
    if rate is None:
        return None
    usual = snapshot.manifest.metrics_usual.get("lr")
    found = list(optimizer_state.check_lr(rate))
    if not found and usual is not None and 0 < optimizer_state.LR_JUMP * usual < rate:
        what = f"{rate:.3g}, usual in the steps before {usual:.3g}"
        found.append(finding("optimizer.lr-jump", what, {"step": snapshot.manifest.step}, before=usual, now=rate))
    left = Skipped("state of the optimizer", "a snapshot holds none (gradloc.checks.watcher.Watcher)")
    return Report(tuple(found), (left,), {"steps": 1})


def _gradient(snapshot: Snapshot) -> Report:
    manifest = snapshot.manifest
    tally = Tally()
    for one in gradients.check_layers(manifest.layer_norms, manifest.healthy_layer_norms):
        tally.add(one)
    if manifest.limit is not None and not manifest.grad_norm <= manifest.limit:
        what = f"norm {manifest.grad_norm:.4g} of step {manifest.step}, limit {manifest.limit:.4g}"
        tally.add(
            finding("gradient.spike", what, {"step": manifest.step}, norm=manifest.grad_norm, limit=manifest.limit)
        )
    batches = _batches(snapshot)
    factor = {part.rank: part.grad_factor for part in manifest.parts}
    flat = [one.coefficient_BR.double().flatten() * factor[rank] for rank, _, one in batches]
    places = [
        (rank, index, row, one.first_position + column)
        for rank, index, one in batches
        for row in range(one.coefficient_BR.shape[0])
        for column in range(one.coefficient_BR.shape[1])
    ]
    for one_found in gradients.check_coefficients(torch.cat(flat) if flat else torch.zeros(0)):
        token = int(one_found.where.get("token", 0))
        names = ("rank", "micro_batch", "row", "token")
        where = dict(zip(names, places[token], strict=True)) if places else {}
        tally.add(replace(one_found, where=where))
    return Report(tally.findings(), (), {"micro_batches": len(batches)})


_OF_SNAPSHOT: dict[str, Callable[[Snapshot], Report | None]] = {
    "data": _data,
    "reward": _reward,
    "policy": _policy,
    "gradient": _gradient,
    "optimizer": _optimizer,
}
SNAPSHOT_LAYERS = tuple(_OF_SNAPSHOT)
