"""A model split over two processes is explained as the whole one is."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.snapshot import SnapshotRejected
from gradloc_localizer.driver import Options, explain
from gradloc_localizer.split_processes import SplitFailed, Told, concluded, device_of, explain_here, free_port

HOLDING = Path(__file__).with_name("holding.py")
ALONE = Options(device="cpu", num_threads=1)


def split(url, num=2, **changes):
    return explain_here(url, replace(ALONE, num_processes=num, **changes), lambda _stage, _fraction: None)[1]


def mixture(trainer):
    """Eight experts, of which a token chooses two."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=trainer.vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.08,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_the_finding_is_that_of_one_process(trainer, written, assert_same):
    url, seen = written(trainer.model(num_layers=2)), []  # its embeddings are tied
    _, alone = explain(url, ALONE)
    manifest, found = explain_here(url, replace(ALONE, num_processes=2), lambda *told: seen.append(told))
    assert alone.verdict == "token" and alone.certificate.holds
    assert_same(found, alone)
    assert manifest.step == found.step == 7
    assert [stage for stage, _ in seen][-1] == "done"


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_a_mixture_of_eight_experts(trainer, written, assert_same):
    url = written(mixture(trainer))
    assert_same(split(url), explain(url, ALONE)[1])


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_three_processes_and_a_whole_sequence(trainer, written, assert_same):
    url = written(trainer.model(num_layers=2, tied=False), fault=trainer.advantage(60.0))
    alone = explain(url, ALONE)[1]
    assert alone.verdict == "sequence"
    assert_same(split(url, 3), alone)


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_a_coefficient_that_is_not_finite(trainer, written):
    """Who has no row must not bring in a NaN of its own."""
    url = written(trainer.model(num_layers=2), fault=trainer.advantage(math.nan))
    alone, found = explain(url, ALONE)[1], split(url)
    assert alone.verdict == found.verdict == "non-finite" and alone.culprits
    assert [one.token for one in found.culprits] == [one.token for one in alone.culprits]
    assert found.certificate.norm_without == pytest.approx(alone.certificate.norm_without, rel=1e-5)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("num", [2, 4])
def test_a_process_holds_its_part_of_the_parameters_and_never_all(trainer, written, num):
    url = written(trainer.model(num_layers=12, hidden_size=512))
    address = f"127.0.0.1:{free_port()}"
    words = [[sys.executable, str(HOLDING), url, str(num), str(rank), address] for rank in range(num)]
    processes = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in words]
    told = [json.loads(process.communicate(timeout=900)[0]) for process in processes]
    whole = told[0][1]
    assert sum(own for own, _, _ in told) == whole
    assert max(own for own, _, _ in told) <= whole / num * 1.01
    report = [(own / whole, grown / whole) for own, _, grown in told]
    assert max(grown for _, _, grown in told) < 0.9 * whole, report
    sys.stderr.write(f"{num} processes, {whole >> 20} MiB: held, grown by: {report}\n")


def test_a_device_each_or_a_refusal():
    assert [device_of("auto", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [device_of(name, 3, 0) for name in ("auto", "cpu")] == ["auto", "cpu"]
    assert device_of("cuda:1", 0, 2) == "cuda:1"
    with pytest.raises(SplitFailed, match="3 processes of a split model met on a machine with 2 GPUs"):
        device_of("auto", 2, 2)


def test_how_processes_ended_is_told_by_the_one_that_knows():
    failed, waiting = Told(kind="failed", reason="RuntimeError: x"), Told(kind="waiting", reason="it waited")
    for ended, error, says in (
        ([Told(kind="rejected", reason="it was altered"), None], SnapshotRejected, "altered"),
        ([failed, None], SplitFailed, "process 2 of 2 .* died"),
        ([waiting, failed], SplitFailed, "process 2 of 2 .* RuntimeError: x"),
        ([Told(finding="{}"), failed], SplitFailed, "process 2 of 2"),
    ):
        with pytest.raises(error, match=says):
            concluded("file:///nowhere", ended)


def test_what_is_no_snapshot_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SnapshotRejected, match="no snapshot at"):
        split(tmp_path.as_uri())
