"""Inside the loop: the watcher's bundles, the checking collate function, anomaly mode, memory; and verifying a step."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from gradloc.checks.anomaly import find_bad_operation
from gradloc.checks.batch import BatchRejected, BatchSettings, CheckedCollate, check_batch
from gradloc.checks.bundle import BUNDLES_MAX, read_bundle, write_bundle
from gradloc.checks.doctor import examine
from gradloc.checks.documents import DocumentRejected, check_document
from gradloc.checks.gradients import distribution
from gradloc.checks.healthy_step import StepNumbers, compare, not_compared
from gradloc.checks.losses import kl_coefficient
from gradloc.checks.planted.data import BATCH_SETTINGS, healthy_batch
from gradloc.checks.planted.gradient import healthy_model, loss_of
from gradloc.checks.ratios import TokenBatch
from gradloc.checks.rewards import check_rewards
from gradloc.checks.watcher import Watcher


@pytest.fixture
def training():
    model = healthy_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_bundle_is_saved_before_the_update_and_can_be_checked_again(training, tmp_path):
    model, optimizer = training
    watcher = Watcher(model, optimizer, folder=tmp_path, every=10)
    loss_of(model).backward()
    before = model.lm_head.weight.detach().clone()
    tokens = TokenBatch(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.tensor([[-1.0, -90.0]]))
    found = watcher.before_update(
        20, batch=healthy_batch(), rewards_of_batch=[1.0, None], loss_parts={"policy": 0.1}, tokens=tokens
    )
    assert {"reward.not-a-number", "policy.token-mismatch"} <= {one.code for one in found}
    assert torch.equal(before, model.lm_head.weight)
    (home,) = watcher.bundles
    document = read_bundle(home)
    assert "policy.token-mismatch" in check_document("policy", document).codes
    assert "reward.not-a-number" in check_document("reward", document).codes
    assert examine(tmp_path).num_findings >= 2


def test_a_nan_is_caught_between_the_watched_steps(training, tmp_path):
    model, optimizer = training
    watcher = Watcher(model, optimizer, folder=tmp_path, every=100)
    loss_of(model).backward()
    model.lm_head.weight.grad[0, 0] = math.nan
    assert [one.code for one in watcher.before_update(7)] == ["gradient.non-finite"]
    assert len(watcher.bundles) == 1


def test_a_storm_of_findings_does_not_fill_the_disk(training, tmp_path):
    model, optimizer = training
    watcher = Watcher(model, optimizer, folder=tmp_path, every=1, bundle_bytes_max=64)
    loss_of(model).backward()
    for step in range(2 * BUNDLES_MAX):
        assert watcher.before_update(step, loss_parts={"kl": math.nan}, batch=healthy_batch())
    assert len(list(tmp_path.iterdir())) == BUNDLES_MAX
    left_out = json.loads((watcher.bundles[0] / "bundle.json").read_text())["left_out"]
    assert left_out


def test_a_job_that_crashes_again_and_again_does_not_fill_the_disk(training, tmp_path):
    loss_of(training[0]).backward()
    for process in range(2 * BUNDLES_MAX):
        Watcher(*training, folder=tmp_path).before_update(process, loss_parts={"kl": math.nan})
    assert len(list(tmp_path.iterdir())) == BUNDLES_MAX


def test_rewards_and_losses_may_be_tensors_or_numpy_numbers(training):
    watcher = Watcher(*training, every=1)
    loss = loss_of(training[0])
    loss.backward()
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for given in (rewards, rewards.numpy(), list(rewards.numpy())):
        assert watcher.before_update(1, rewards_of_batch=given, loss_parts={"policy": loss}) == ()
    (found,) = watcher.before_update(2, rewards_of_batch=torch.tensor([0.0, math.nan]), loss_parts={"policy": loss})
    assert (found.code, found.where["index"], watcher.num_failed) == ("reward.not-a-number", 1, 0)


def test_a_callers_function_that_fails_does_not_reach_the_loop(training, monkeypatch):
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    watcher = Watcher(*training, on_findings=lambda step, found: 1 / 0)
    assert len(watcher.before_update(0, loss_parts={"kl": math.nan})) == 1 and watcher.num_failed == 1


def test_a_batch_that_cannot_be_checked_goes_on(monkeypatch):
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    assert CheckedCollate(lambda _: (1, 2))(None) == (1, 2)
    monkeypatch.setenv("GRADLOC_STRICT", "1")
    with pytest.raises(AttributeError):
        CheckedCollate(lambda _: (1, 2))(None)


def test_the_watcher_never_hurts_training(training, monkeypatch):
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    watcher = Watcher(*training, every=1)
    assert watcher.before_update(0, rewards_of_batch=[1.0], groups=["a", "b"]) == ()
    assert watcher.num_failed == 1
    monkeypatch.setenv("GRADLOC_STRICT", "1")
    with pytest.raises(ValueError, match="groups"):
        watcher.before_update(0, rewards_of_batch=[1.0], groups=["a", "b"])


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_parameters_are_watched_without_a_collective(one_rank, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = Watcher(model, optimizer, folder=tmp_path, every=1)
    found = []
    for step in range(2):
        model(torch.ones(4, 8)).square().mean().backward()
        if step:
            next(model.parameters()).grad.to_local()[0, 0] = math.nan
        with CommDebugMode() as collectives:
            found += watcher.before_update(step)
        assert collectives.get_total_counts() == 0
        optimizer.step()
        optimizer.zero_grad()
        with CommDebugMode() as collectives:
            found += watcher.after_step()
        assert collectives.get_total_counts() == 0
    assert [one.code for one in found] == ["gradient.non-finite", "optimizer.state-non-finite"]


@pytest.mark.parametrize("name", ["bundle.json", "tensors.safetensors"])
def test_a_torn_bundle_is_refused(name, tmp_path):
    home = write_bundle(tmp_path, 3, (), {"grad_norm": math.inf}, {"logp": torch.zeros(4)})
    assert read_bundle(home)["grad_norm"] == "Infinity"
    (home / name).write_bytes((home / name).read_bytes()[:10])
    with pytest.raises(DocumentRejected):
        read_bundle(home)


def test_collate_raises_on_errors_or_reports():
    bad = healthy_batch() | {"rewards": torch.tensor([math.nan, 1.0])}
    with pytest.raises(BatchRejected, match="batch-non-finite"):
        CheckedCollate(lambda _: bad, BATCH_SETTINGS)(None)
    heard = []
    reporting = CheckedCollate(lambda _: bad, BATCH_SETTINGS, on_error="report", on_findings=heard.extend)
    assert reporting(None) is bad and heard


@pytest.mark.parametrize("batch", [{}, {"input_ids": torch.zeros(0, 4, dtype=torch.long)}, {"x": "text"}])
def test_empty_batches(batch):
    assert check_batch(batch, BatchSettings(vocabulary_size=10)) == ()


def test_anomaly_mode_names_the_operation_and_restores_gradients(training):
    model, _ = training
    loss_of(model).backward()
    before = model.lm_head.weight.grad
    (found,) = find_bad_operation(model, lambda: (loss_of(model) * 0).sqrt())
    assert found.where == {"operation": "SqrtBackward0", "pass": "backward"}
    (found,) = find_bad_operation(model, lambda: (loss_of(model) * 0).log())
    assert found.where["operation"] == "log"
    assert model.lm_head.weight.grad is before


def test_the_largest_entry_is_far_above_the_mean_on_a_healthy_model(training):
    model, _ = training
    loss_of(model).backward()
    seen = distribution(p.grad for p in model.parameters())
    whole = torch.cat([p.grad.flatten() for p in model.parameters()]).abs().double()
    assert seen.mean == pytest.approx(float(whole.mean())) and seen.largest == pytest.approx(float(whole.max()))
    assert seen.std == pytest.approx(float(whole.std(unbiased=False)), rel=1e-6)
    assert seen.p95 == pytest.approx(float(torch.quantile(whole, 0.95)), rel=1e-5)
    assert seen.largest > 10 * seen.mean
    assert distribution([]).num == 0
    assert math.isnan(distribution([torch.ones(2), torch.tensor([math.nan])]).largest)


@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_a_coefficient_cannot_be_calibrated_before_the_policy_moved(values):
    with pytest.raises(ValueError, match="expected a positive number"):
        kl_coefficient(*values)
    assert kl_coefficient(2.0, 4.0) == pytest.approx(0.05)


HEALTHY = StepNumbers(loss=0.02, loss_scale=0.5, reward_mean=0.4, reward_std=0.3, grad_norm=0.5)


@pytest.mark.parametrize(
    ("now", "outside"),
    [
        (StepNumbers(loss=-0.3, reward_mean=0.5, reward_std=0.2, grad_norm=0.6), []),
        (StepNumbers(loss=0.02, reward_mean=0.4, reward_std=0.3, grad_norm=640.0), ["grad_norm"]),
        (StepNumbers(loss=0.02, grad_norm=0.5), ["reward_mean", "reward_std"]),
        (StepNumbers(loss=math.nan, reward_mean=0.4, reward_std=0.3, grad_norm=0.5), ["loss"]),
        (StepNumbers(loss=0.02, reward_mean=9.0, reward_std=0.0, grad_norm=0.5), ["reward_mean", "reward_std"]),
        (
            StepNumbers(loss=0.02, reward_mean=0.4, reward_std=0.3, grad_norm=0.5, repeat_error=0.1),
            ["difference of two replays"],
        ),
        (StepNumbers(loss=math.inf, reward_mean=0.4, reward_std=0.3, grad_norm=0.0), ["loss", "grad_norm"]),
    ],
)
def test_a_step_passes_only_if_all_numbers_are_back(now, outside):
    assert [one.name for one in compare(now, HEALTHY) if not one.is_back] == outside


def test_what_the_healthy_step_does_not_know_is_said_and_a_layer_that_is_gone_does_not_pass():
    healthy = StepNumbers(grad_norm=0.5, layer_norms={"a": 0.3, "b": 0.4})
    now = StepNumbers(loss=0.0, grad_norm=0.5, layer_norms={"a": 0.3})
    assert [one.name for one in compare(now, healthy) if not one.is_back] == ["layer b"]
    assert {one.what: one.why for one in not_compared(now, healthy)} == {
        "loss": "the healthy step does not know it",
        "reward_mean": "neither step knows it",
        "reward_std": "neither step knows it",
    }


def test_an_on_policy_loss_of_zero_leaves_room_for_the_next():
    (loss,) = compare(StepNumbers(loss=0.004), StepNumbers(loss=0.0))
    assert loss.is_back


def test_a_step_needs_something_healthy_to_be_compared_with():
    with pytest.raises(ValueError, match="share no number"):
        compare(StepNumbers(loss=1.0), StepNumbers(grad_norm=1.0))
    with pytest.raises(ValueError, match="not finite"):
        compare(StepNumbers(grad_norm=1.0), StepNumbers(grad_norm=math.nan))


def test_verify_step_on_documents(tmp_path, gradloc):
    (tmp_path / "healthy.json").write_text(json.dumps({"loss": 0.1, "rewards": [0, 1, 1], "grad_norm": 0.4}))
    (tmp_path / "fixed.json").write_text(json.dumps({"loss": 0.2, "rewards": [1, 0, 1], "grad_norm": 0.5}))
    (tmp_path / "bad.json").write_text(json.dumps({"loss": math.nan, "rewards": [1, 0, 1], "grad_norm": 0.5}))
    for name, code in (("fixed", 0), ("bad", 1)):
        result = gradloc("verify-step", tmp_path / f"{name}.json", "--against", tmp_path / "healthy.json", "--json")
        assert result.returncode == code, result.stderr
    assert gradloc("verify-step", tmp_path / "fixed.json").returncode == 2


def test_the_doctor_keeps_its_budget_and_says_what_it_left_out(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.log").write_text("loss: 0.1\n" * 20)
    ticks = iter(range(0, 10_000, 100))
    found = examine(tmp_path, budget_s=250.0, clock=lambda: float(next(ticks)))
    assert any("budget" in one.why for one in found.skipped)
    assert {"reward", "optimizer"} <= {one.what for one in found.skipped}


def test_the_doctor_of_an_empty_folder_names_every_layer_it_did_not_see(tmp_path):
    found = examine(tmp_path)
    assert found.is_well and len(found.skipped) == 6


@pytest.mark.parametrize("rewards", [[], [None], [math.nan] * 4, [math.inf, -math.inf], [0.0]])
def test_rewards_of_every_sort_give_a_report(rewards):
    json.dumps(check_rewards(rewards, lengths=[1.0] * len(rewards)).to_json(), allow_nan=False)
