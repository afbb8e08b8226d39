"""Snapshots of large models hold no weights: they say where these lie, and the localizer whether it read the same."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import gradloc
from gradloc.snapshot import open_snapshot
from gradloc.weights_elsewhere import fingerprint_of, is_same
from gradloc_localizer.command import localize
from gradloc_localizer.driver import Options, explain

SPIKE = 12


@pytest.fixture(scope="module")
def kept(trainer, tmp_path_factory):
    """A run whose model is too large for its snapshots: folder of the spike's, and of the weights before it."""
    folder = tmp_path_factory.mktemp("run")
    model = trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    probe = gradloc.watch(
        model, optimizer, run="large", store=(folder / "store").as_uri(), weights_bytes_max=1_000,
        checkpoint=lambda: (folder / "checkpoint").as_uri(),
    )  # fmt: skip
    for step in range(SPIKE + 2):
        inputs = []
        trainer.step(model, seed=step, fault=inputs.extend, num_ranks=1)  # for its batches: the loop is below
        if step == SPIKE:
            save(model, folder / "checkpoint")
            inputs[0][0]["log_ratio"][2, 3] = 9.0
        train(model, probe, inputs[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    save(model, folder / "later", num_files=2)
    probe.close()
    return folder


def train(model, probe, batches):
    num_tokens = sum(int(batch["mask"].sum()) for batch in batches)
    for batch in batches:
        logits = model(
            input_ids=batch["ids"], attention_mask=batch["attention"].long(), position_ids=batch["positions"]
        ).logits[:, 5:-1]
        logp = logits.log_softmax(-1).gather(-1, batch["ids"][:, 6:, None])[..., 0]
        rollout = logp.detach() - batch["log_ratio"]
        probe.tokens(
            logp, batch["ids"], batch["mask"], rollout_logp=rollout, advantage=batch["advantage"],
            attention_mask=batch["attention"], position_ids=batch["positions"],
        )  # fmt: skip
        (-(batch["advantage"] * torch.exp(logp - rollout) * batch["mask"]).sum() / num_tokens).backward()
    probe.observe(loss=0.0)


def save(model, folder, num_files=1):
    folder.mkdir()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = {name: f"model-{number % num_files}.safetensors" for number, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def snapshot_of(folder):
    (found,) = [path.parent for path in (folder / "store").glob("large/0/*/manifest.json")]
    assert found.name == str(SPIKE)
    return found


def test_the_snapshot_holds_the_batch_and_says_where_weights_are(kept):
    manifest = open_snapshot(snapshot_of(kept).as_uri()).manifest
    assert (manifest.weights, manifest.weights_at) == ("none", (kept / "checkpoint").as_uri())
    assert sorted(path.name for path in snapshot_of(kept).iterdir()) == ["batch", "manifest.json", "parts"]


@pytest.mark.parametrize("told", ["by the user", "by the snapshot, where that is allowed"])
def test_with_the_steps_own_weights_the_finding_is_exact(kept, told):
    own = {"weights": (kept / "checkpoint").as_uri()} if told == "by the user" else {"checkpoints": (kept.as_uri(),)}
    _, finding = explain(snapshot_of(kept).as_uri(), Options(num_threads=1, device="cpu", **own))
    assert (finding.verdict, finding.approximate) == ("token", False)
    assert finding.fidelity.reproduced and finding.certificate.holds
    assert [(one.micro_batch, one.sequence, one.token) for one in finding.culprits] == [(0, 2, 9)]


def test_other_weights_make_it_approximate(kept):
    options = Options(num_threads=1, device="cpu", weights=(kept / "later").as_uri())
    _, finding = explain(snapshot_of(kept).as_uri(), options)
    assert finding.approximate and "approximate" in finding.summary
    assert [(one.micro_batch, one.sequence, one.token) for one in finding.culprits] == [(0, 2, 9)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "holds no weights; it refers to file://"),
        (("--weights", "nowhere"), "no weights at file://"),
        (("--weights", "store"), "no weights at file://"),
        (("--weights", "bad"), "no index of weights"),
        (("--weights", "other"), "do not fit"),
    ],
)
def test_weights_that_are_not_there_are_one_line(kept, more, said):
    (kept / "bad").mkdir(exist_ok=True)
    (kept / "bad" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    (kept / "other").mkdir(exist_ok=True)
    save_file({"a": torch.zeros(2)}, kept / "other" / "model.safetensors")
    arguments = [str(snapshot_of(kept)), *more[:1], *(str(kept / one) for one in more[1:])]
    result = CliRunner().invoke(localize, [*arguments, "--threads", "1", "--device", "cpu"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_place_that_only_the_snapshot_names_is_not_read(kept):
    for checkpoints in ((), ("s3://elsewhere",), ((kept / "check").as_uri(),), ("file:///",)[:0]):
        with pytest.raises(ValueError, match="holds no weights"):
            explain(snapshot_of(kept).as_uri(), Options(num_threads=1, device="cpu", checkpoints=checkpoints))


@pytest.mark.parametrize("change", [1e-7, math.nan, math.inf])
def test_one_element_that_moved_is_seen(trainer, change):
    weights = {name: tensor.clone() for name, tensor in trainer.model().state_dict().items()}
    told = fingerprint_of(weights)
    assert is_same(told, weights)
    assert is_same(told, {name: tensor.clone() for name, tensor in reversed(weights.items())})
    next(iter(weights.values())).view(-1)[7] += change
    assert not is_same(told, weights)
    assert not is_same(told, {})
    assert not is_same({}, weights)
