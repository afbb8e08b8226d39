"""Triage takes the right branch on logs of public formats and on failures provoked here; else it says why not."""

import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc.checks.log_series import read_lines, read_log
from gradloc.checks.log_shapes import collapse, plateau, saw_tooth
from gradloc.checks.log_signals import signal_of
from gradloc.checks.triage import triage

FORMATS = runpy.run_path(str(Path(__file__).with_name("log_formats.py")))
FAILURES, HEALTHY, UNKNOWN = FORMATS["FAILURES"], FORMATS["HEALTHY"], FORMATS["UNKNOWN"]


def decided(lines, tmp_path, name="train.log"):
    path = tmp_path / ("trainer_state.json" if lines and "log_history" in lines[0] else name)
    path.write_text("\n".join(lines))
    found = triage(read_log(path))
    json.dumps(found.to_json(), allow_nan=False)
    return found


@pytest.mark.parametrize("name", FAILURES)
def test_the_right_branch(name, tmp_path):
    lines, branch, layer = FAILURES[name]
    found = decided(lines, tmp_path)
    assert (found.branch, found.layer) == (branch, layer), found
    assert found.why and found.todo


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log(name, tmp_path):
    found = decided(HEALTHY[name], tmp_path)
    assert found.branch == "healthy", found


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_log_says_why(name, tmp_path):
    found = decided(UNKNOWN[name], tmp_path)
    assert found.branch == "unknown" and len(found.why) > 20


def test_the_step_is_named():
    found = triage(read_lines(FAILURES["verl: all NaN at step 83"][0]))
    assert found.step == 83


def test_consequences_are_named_as_well():
    found = triage(read_lines(FAILURES["OOM on one rank, time-outs on others"][0]))
    assert set(found.also) == {"nccl-timeout", "rank-died"}


def test_a_table_of_a_notebook():
    lines = [
        "Step | Training Loss | reward | kl",
        "-- | -- | -- | --",
        "1 | -0.28 | 13.4 | nan",
        "2 | -0.14 | 6.9 | nan",
    ]
    found = triage(read_lines(lines))
    assert (found.branch, found.layer, found.step) == ("nan", "policy", 1)


def test_a_ray_list_of_possible_causes_is_no_evidence_of_the_first():
    line = next(line for line in FAILURES["Ray: a worker died"][0] if "OOM killer" in line)
    assert signal_of(line, 1).name == "rank-died"


def test_warnings_are_no_errors():
    assert signal_of("UserWarning: this is deprecated", 1) is None
    assert signal_of("FutureWarning: x", 1) is None


@pytest.mark.parametrize("values", [[], [1.0], [float("nan")] * 60, [float("inf")] * 60, [0.0] * 5])
def test_shapes_need_finite_numbers_and_enough_of_them(values):
    assert (plateau(values), saw_tooth(values), collapse(values)) == (None, None, None)


# --- real failures, provoked here -------------------------------------------------------------------

_STEPS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(num, spoil=lambda step, loss: loss):
    for step in range(num):
        loss = spoil(step, model(torch.randn(8, 4)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print({"step": step, "loss": loss.item(), "grad_norm": norm.item()}, flush=True)
train(3)
"""
PROVOKED = {
    "an id outside the vocabulary": ("torch.nn.Embedding(10, 4)(torch.tensor([12]))", "device-assert", "data"),
    "sampling from NaN": ("torch.multinomial(torch.tensor([float('nan'), 1.0]), 1)", "device-assert", "policy"),
    "a loss that becomes NaN": ("train(5, lambda step, loss: (loss - 9).log() if step > 2 else loss)", "nan", "policy"),
    "a NaN that only the gradient has": (
        "train(5, lambda step, loss: loss + (loss * 0).sqrt() if step > 2 else loss)",
        "nan",
        "gradient",
    ),
    "anomaly mode": (
        "torch.autograd.set_detect_anomaly(True)\ntrain(5, lambda step, loss: (loss - loss.detach()).sqrt() * 0)",
        "nan",
        "gradient",
    ),
    "shapes that do not fit": ("torch.zeros(2, 3) + torch.zeros(2, 4)", "shape-mismatch", "data"),
    "a matrix that does not fit": ("model(torch.zeros(2, 5))", "shape-mismatch", "data"),
    "formats that do not fit": ("model(torch.zeros(2, 4, dtype=torch.bfloat16))", "dtype-mismatch", "policy"),
    "a tensor too large": ("torch.empty(1 << 52)", "host-oom", "optimizer"),
    "a torn data file": ("import json\njson.loads('{\"prompt\": ')", "data-error", "data"),
    "half a surrogate pair": ("'\\ud83d'.encode()", "data-error", "data"),
    "a reward that is no number": ("float('good')", "data-error", "data"),
    "rows of different length": (
        "torch.utils.data.default_collate([torch.zeros(3), torch.zeros(4)])",
        "shape-mismatch",
        "data",
    ),
}


# Each fails in a process of its own, forked from one that has imported torch and what optimizers import late.
_FORKS = """
import json, os, sys, traceback
import torch, torch._dynamo
for log, code in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def provoked_logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provoked")
    logs = {name: folder / f"{number}.log" for number, name in enumerate(PROVOKED)}
    failures = [(str(logs[name]), _STEPS + code) for name, (code, _, _) in PROVOKED.items()]
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS, json.dumps(failures)], check=True, timeout=240)
    return logs


@pytest.mark.parametrize("name", PROVOKED)
def test_a_failure_provoked_on_the_cpu(name, provoked_logs):
    _, branch, layer = PROVOKED[name]
    log = provoked_logs[name]
    found = triage(read_log(log))
    assert (found.branch, found.layer) == (branch, layer), log.read_text()[-800:]


_RANKS = """
import datetime, os, signal, sys, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
import torch
if dist.get_rank() == 1:
    if sys.argv[1] == "absent":
        import time; time.sleep(8); sys.exit(0)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "branch"), [("absent", "nccl-timeout"), ("SIGKILL", "host-oom"), ("SIGSEGV", "rank-died")]
)
def test_a_rank_that_fails_under_torchrun(how, branch, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS)
    log = tmp_path / "train.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    with log.open("w") as out:
        subprocess.run(
            [*torchrun, "--master-addr", "127.0.0.1", script, how],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=150,
            check=False,
        )
    found = triage(read_log(log))
    assert found.branch == branch, log.read_text()[-2000:]
