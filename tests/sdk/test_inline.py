"""Inline mode: the spike is explained in the training process, which goes on as if nothing had been."""

import contextlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradloc
from gradloc import inline

LogpOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]
SCRIPT = Path(__file__).with_name("inline_ranks.py")
SPIKE = 12
REST = 20.0
AUXILIARY = 100.0


def weights(kind: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    weight_BR = torch.randn(shape, generator=generator)
    if kind in ("token", "rest", "scale"):
        weight_BR[1, 3] = 2e3
    elif kind == "sequence":
        weight_BR[2] = 1e3
    elif kind == "batch":
        weight_BR *= 50
    elif kind == "pair":
        weight_BR[0, 3], weight_BR[1, 3] = 2e3, -1.9e3
    elif kind == "nan":
        weight_BR[1, 3] = math.nan
    elif kind == "zero":
        weight_BR *= 0
    return weight_BR


def train(
    model: nn.Module,
    logp: LogpOf,
    kind: str,
    *,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    **watching: Any,
) -> tuple[gradloc.Probe, dict[str, torch.Tensor], list[str]]:
    """Fourteen steps with a spike at the twelfth; the probe, all that must not differ, and decisions."""
    torch.manual_seed(1)
    model.load_state_dict({name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled)
    if watching.get("localize") and scaled:
        watching["scaler"] = scaler
    probe = gradloc.watch(model, optimizer, run="run", **watching)
    generator = torch.Generator().manual_seed(3)
    decisions = []
    seen: dict[str, torch.Tensor] = {}
    enclosing = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with enclosing:
        for step in range(SPIKE + 2):
            for micro_batch in range(2):
                ids_BT = torch.randint(0, 11, (4, 8), generator=generator)
                if kind == "pair" and step == SPIKE and micro_batch == 0:
                    ids_BT[1] = ids_BT[0]
                logp_BR = logp(model, ids_BT)
                struck = step == SPIKE and (micro_batch == 0 or kind in ("batch", "zero"))
                weight_BR = weights(kind if struck else "healthy", logp_BR.shape, generator)
                probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=logp_BR.detach())
                scaler.scale(-(weight_BR * logp_BR).mean()).backward()
            if kind in ("rest", "auxiliary") and step == SPIKE:
                ((REST if kind == "rest" else AUXILIARY) * model.lm_head.weight.square().sum()).backward()
            if kind == "scale" and step == SPIKE:
                for parameter in model.parameters():
                    parameter.grad *= 4  # as an optimizer's wrapper might
            scaler.unscale_(optimizer)
            decisions.append(probe.observe())
            if step == SPIKE:
                seen = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                seen["random"] = torch.get_rng_state()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    probe.close()
    return probe, seen | {name: value.clone() for name, value in model.state_dict().items()}, decisions


@pytest.mark.parametrize("kind", ["token", "sequence", "batch", "pair"])
def test_the_spike_is_explained_and_training_does_not_notice(tiny_model: nn.Module, logp: LogpOf, kind: str) -> None:
    _, without, decisions = train(tiny_model, logp, kind)
    probe, after, decisions_inline = train(tiny_model, logp, kind, localize="inline")
    assert decisions == decisions_inline
    assert tiny_model.training
    assert [name for name, value in without.items() if not torch.equal(value, after[name])] == []
    (finding,) = probe.findings
    assert finding.step == SPIKE
    assert finding.verdict == {"batch": "batch-wide", "pair": "token"}.get(kind, kind)
    assert abs(finding.checksum - 1) <= 5e-3 * max(1.0, abs(finding.culprits[0].share))
    assert finding.cost.steps <= 1.0
    places = [(one.micro_batch, one.sequence, one.token) for one in finding.culprits]
    if kind == "token":
        assert places == [(0, 1, 4)]
        assert finding.certificate.holds
        assert finding.certificate.norm_without < 4 * finding.healthy_norm
        assert finding.certificate.minimal
    elif kind == "sequence":
        assert places[0][:2] == (0, 2)
        assert finding.share > 0.9
        assert finding.certificate.holds
    elif kind == "pair":
        assert set(places) == {(0, 0, 4), (0, 1, 4)}
    else:
        assert finding.certificate is None


@pytest.mark.parametrize(("autocast", "scaled"), [(None, True), (torch.bfloat16, False), (torch.float16, True)])
def test_number_formats_of_training_are_those_of_the_explanation(
    tiny_model: nn.Module, logp: LogpOf, autocast: torch.dtype | None, scaled: bool
) -> None:
    _, without, _ = train(tiny_model, logp, "token", autocast=autocast, scaled=scaled)
    probe, after, _ = train(tiny_model, logp, "token", autocast=autocast, scaled=scaled, localize="inline")
    assert [name for name, value in without.items() if not torch.equal(value, after[name])] == []
    assert probe.finding.verdict == "token"
    assert (probe.finding.culprits[0].sequence, probe.finding.culprits[0].token) == (1, 4)
    assert abs(probe.finding.checksum - 1) <= (5e-3 if autocast is None else 0.15)


def test_what_belongs_to_no_token_is_measured_as_the_rest(tiny_model: nn.Module, logp: LogpOf) -> None:
    probe, seen, _ = train(tiny_model, logp, "rest", localize="inline")
    gradients = [value.double() for name, value in seen.items() if name.startswith("grad.")]
    square = sum(float(gradient.square().sum()) for gradient in gradients)
    finding = probe.finding
    assert finding.verdict == "token"
    assert (finding.culprits[0].sequence, finding.culprits[0].token) == (1, 4)
    assert 0.02 < finding.rest_share < 0.5
    assert sum(share for *_, share in finding.shares_by_sequence) == pytest.approx(1 - finding.rest_share, abs=1e-6)
    weight = _weight_at_the_spike(tiny_model, logp)
    share = float((2 * REST * weight.double() * seen["grad.lm_head.weight"].double()).sum()) / square
    assert finding.rest_share == pytest.approx(share, abs=5e-3)


def test_a_spike_of_an_auxiliary_loss_is_rest_dominated_and_no_tokens_fault(
    tiny_model: nn.Module, logp: LogpOf
) -> None:
    probe, seen, _ = train(tiny_model, logp, "auxiliary", localize="inline")
    square = sum(float(value.double().square().sum()) for name, value in seen.items() if name.startswith("grad."))
    weight = _weight_at_the_spike(tiny_model, logp)
    share = float((2 * AUXILIARY * weight.double() * seen["grad.lm_head.weight"].double()).sum()) / square
    finding = probe.finding
    (cause, *_) = finding.causes
    assert share > 0.9
    assert (finding.verdict, cause.name, cause.confidence) == ("accounting", "rest-dominated", "high")
    assert cause.evidence["rest_share"] == pytest.approx(share, abs=5e-3)


@pytest.mark.parametrize("kind", ["token", "rest", "batch"])
def test_where_tokens_explain_the_spike_no_rest_is_blamed(tiny_model: nn.Module, logp: LogpOf, kind: str) -> None:
    probe, _, _ = train(tiny_model, logp, kind, localize="inline")
    assert "rest-dominated" not in [cause.name for cause in probe.finding.causes]


def _weight_at_the_spike(model: nn.Module, logp: LogpOf) -> torch.Tensor:
    """lm_head as it was before the update of the spike."""
    seen: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(model.lm_head.weight.detach().clone()))
    train(model, logp, "rest")
    handle.remove()
    return seen[2 * SPIKE]


def test_a_scale_between_coefficients_and_gradients_is_an_accounting_fault(tiny_model: nn.Module, logp: LogpOf) -> None:
    probe, _, _ = train(tiny_model, logp, "scale", localize="inline")
    assert probe.finding.verdict == "accounting"
    assert probe.finding.checksum == pytest.approx(0.25, abs=0.01)


def test_what_is_not_finite_is_named_without_a_forward_pass(tiny_model: nn.Module, logp: LogpOf) -> None:
    probe, _, _ = train(tiny_model, logp, "nan", localize="inline", skip_above=10.0)
    finding = probe.findings[0]
    assert finding.verdict == "non-finite"
    assert (finding.culprits[0].sequence, finding.culprits[0].token) == (1, 4)
    assert finding.cost.steps == 0


@pytest.mark.parametrize("kind", ["healthy", "zero"])
def test_without_a_spike_nothing_is_computed(tiny_model: nn.Module, logp: LogpOf, kind: str) -> None:
    probe, _, _ = train(tiny_model, logp, kind, localize="inline")
    assert list(probe.findings) == []
    assert probe.finding is None


def test_a_storm_of_spikes_is_explained_now_and_then(tiny_model: nn.Module) -> None:
    one = inline.InlineLocalizer(tiny_model, tiny_model, rank=0, world_size=1, device=torch.device("cpu"), texts=None)
    spikes = [step for step in range(100) if one.wants(step) and _explained(one, step)]
    assert spikes == list(range(0, 100, inline.SPACING_STEPS))


def _explained(one: inline.InlineLocalizer, step: int) -> bool:
    from gradloc_proto.messages import Limits

    one.explain(inline.SpikedStep(step, 0.0, {}, Limits(norm=1.0), ("norm",)), (), 1.0)
    return True


def test_a_failure_of_ours_is_one_line_and_less_telemetry(
    tiny_model: nn.Module, logp: LogpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    _, without, _ = train(tiny_model, logp, "token")
    calls = []

    def break_the_second_pass(*_: Any) -> None:
        if not torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("out of memory")

    tiny_model.register_forward_pre_hook(break_the_second_pass)
    probe, after, _ = train(tiny_model, logp, "token", localize="inline")
    assert len(calls) == 4
    assert probe.finding is None
    assert [name for name, value in without.items() if not torch.equal(value, after[name])] == []
    assert [record.message for record in caplog.records if "localize failed" in record.message]


def test_bad_arguments_are_refused_before_training(tiny_model: nn.Module) -> None:
    with pytest.raises(ValueError, match="localize is 'online'"):
        gradloc.watch(tiny_model, run="run", localize="online")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected a torch\.amp\.GradScaler"):
        gradloc.watch(tiny_model, run="run", scaler=3)


def launch(out: Path, *modes: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--out", str(out), "--modes", *modes],
            env=os.environ | shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


def oracle(ranks: list[dict[str, Any]]) -> dict[tuple[int, int, int], torch.Tensor]:
    """Shares [R] by rank, micro-batch and row: one float64 backward pass a token, in one process on whole weights."""
    spec = importlib.util.spec_from_file_location("inline_ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    ranks_script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks_script)
    model = ranks_script.Language().double()
    model.load_state_dict({name: torch.tensor(value) for name, value in ranks[0]["weights"].items()}, strict=False)
    gradients: dict[tuple[int, int, int], torch.Tensor] = {}
    for rank, told in enumerate(ranks):
        for index, (ids, coefficients) in enumerate(told["batches"]):
            ids_BT, coefficient_BR = torch.tensor(ids), torch.tensor(coefficients).double()
            logp_BR = torch.log_softmax(model(ids_BT)[:, :-1], -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            for row in range(len(ids_BT)):
                own = []
                for column in range(logp_BR.shape[1]):
                    found = torch.autograd.grad(logp_BR[row, column], list(model.parameters()), retain_graph=True)
                    own.append(coefficient_BR[row, column] * torch.cat([one.flatten() for one in found]))
                gradients[rank, index, row] = torch.stack(own)
    whole = torch.stack([own.sum(dim=0) for own in gradients.values()]).sum(dim=0)
    return {place: own @ whole / whole.square().sum() for place, own in gradients.items()}


def assert_exact(finding: dict[str, Any], shares: dict[tuple[int, int, int], torch.Tensor]) -> None:
    view = finding["sequence_view"]
    expected = shares[view["rank"], view["micro_batch"], view["sequence"]].tolist()
    found = dict(enumerate(view["shares"], view["first_position"]))
    assert [found[position] for position in range(1, 9)] == pytest.approx(expected, abs=1e-3)
    for rank, micro_batch, sequence, share in finding["shares_by_sequence"]:
        assert share == pytest.approx(float(shares[rank, micro_batch, sequence].sum()), abs=1e-3)
    assert len(finding["shares_by_sequence"]) > 4


def test_ranks_explain_together_replicated_or_sharded_and_nobody_waits_for_one_that_fails(tmp_path: Path) -> None:
    modes = ["ddp", "fsdp2", "fsdp2-bf16"]
    ranks = launch(tmp_path, *modes, "ddp-failing")
    for mode in ("ddp", "fsdp2"):  # the latter's model lies in two processes
        assert_exact(ranks[0][mode]["findings"][0], oracle([rank[mode] for rank in ranks]))
    for mode in modes:
        for rank in ranks:
            assert rank[mode]["differing"] == [], mode
            assert rank[mode]["num_compared"] > 10
            assert rank[mode]["training"]
            (finding,) = rank[mode]["findings"]
            (culprit,) = finding["culprits"]
            where = [culprit[name] for name in ("rank", "micro_batch", "sequence", "token")]
            assert where == [1, 1, 2, 4], mode
            assert finding["verdict"] == "token"
            assert abs(finding["checksum"] - 1) <= (0.15 if "bf16" in mode else 5e-3), mode
            assert finding["cost"]["steps"] <= 1.0
            assert (finding["certificate"] is not None) == (mode == "ddp")
        first, second = ({**rank[mode]["findings"][0], "cost": None} for rank in ranks)
        assert first == second
    for rank in ranks:
        assert rank["ddp-failing"]["findings"] == []
        assert rank["ddp-failing"]["differing"] == []
