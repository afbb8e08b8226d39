"""One performance of the demo: services, pretraining, two ranks of GRPO, and what came of it.

    with perform(script, work, tell) as played: ...            # services are up until the block ends
    with opened(work, 1, "attribution", tell) as house:        # several performances share them
        with staged(house, script, work / "1", tell) as played: ...

Watches from outside, as a user would: the training's progress file, the reporter's REST, the Slack
endpoint. Knows neither which fault was planned for whom nor the truth: that is the judge's.
"""

import contextlib
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradloc.demo.envelope import CHECKPOINT, FAULT_VARIABLE, JUDGE_VARIABLE, MODELS, TINY, TRUTH, WEIGHTS, Cast
from gradloc.demo.slack import CHANNEL, TOKEN, SlackEndpoint
from gradloc.workstation.processes import Process, StartFailed
from gradloc.workstation.services import Plan, Workstation

# Times the model's patience.
PRETRAINING_TIMEOUT_S = 300.0
TRAINING_TIMEOUT_S = 900.0
FINDING_TIMEOUT_S = 300.0
JUDGE_TIMEOUT_S = 300.0
QUIET_TIMEOUT_S = 60.0  # for services to have read a finished run to its end
_POLL_S = 0.1


@dataclass(frozen=True)
class Script:
    """What to play."""

    fault: str
    seed: int
    num_steps: int
    strategy: Literal["attribution", "bisect"] = "attribution"
    kill_redis_at_step: int | None = None
    number: int | None = None  # of several that share their services
    model: str = TINY

    @property
    def cast(self) -> Cast:
        return MODELS[self.model]

    @property
    def run_id(self) -> str:
        run = f"{self.cast.run_prefix}-{self.seed}"
        return run if self.number is None else f"{run}-{self.number}"


@dataclass(frozen=True)
class Told:
    """Progress for whoever looks: a stage, and how far training is (None outside of it)."""

    text: str
    step: int | None = None
    grad_norm: float | None = None


@dataclass
class Played:
    """What was seen. Times are seconds since the epoch."""

    work: Path
    run_id: str
    station: Workstation
    slack: SlackEndpoint
    step_times: list[float] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    incident: dict[str, Any] | None = None
    alert_at: float | None = None
    culprit_at: float | None = None
    redis_killed: bool = False

    @property
    def judge_dir(self) -> Path:
        return self.work / "judge"

    @property
    def truth(self) -> dict[str, Any] | None:
        """The judge's: where it was, or None where nothing struck."""
        truth: dict[str, Any] | None = json.loads((self.judge_dir / TRUTH).read_text())
        return truth

    @property
    def finding(self) -> dict[str, Any] | None:
        return None if self.incident is None else self.incident.get("finding")

    @property
    def slack_texts(self) -> list[str]:
        """What the channel says of this run."""
        return [text for text in self.slack.texts() if f"run {self.run_id} ·" in text]


@dataclass
class House:
    """What performances share: services, the channel, and the policy that each run starts with."""

    station: Workstation
    slack: SlackEndpoint
    pretraining: Process | None  # None: the weights are installed
    folder: Path  # of the pretrained weights

    def wait_ready(self) -> None:
        """Until Ray takes jobs and the weights are there. Raises StartFailed."""
        self.station.wait_ray()
        if self.pretraining is None:
            return
        self.pretraining.wait_ready((self.folder / WEIGHTS).exists, timeout_s=PRETRAINING_TIMEOUT_S)

    def hand_weights_to(self, training: Path) -> None:
        if self.pretraining is None:
            return
        shutil.copyfile(self.folder / CHECKPOINT, training / CHECKPOINT)
        part = training / f"{WEIGHTS}.part"
        shutil.copyfile(self.folder / WEIGHTS, part)
        part.rename(training / WEIGHTS)


@contextlib.contextmanager
def perform(script: Script, work: Path, tell: Callable[[Told], None]) -> Iterator[Played]:
    """Play the script in the folder `work`, with services of its own. Raises StartFailed where a process of ours
    ends early."""
    with (
        opened(work, script.seed, script.strategy, tell, script.model) as house,
        staged(house, script, work, tell) as played,
    ):
        yield played


@contextlib.contextmanager
def opened(
    work: Path,
    seed: int,
    strategy: Literal["attribution", "bisect"],
    tell: Callable[[Told], None],
    model: str = TINY,
) -> Iterator[House]:
    """Services in `work`, and pretraining under way where the model needs it. Raises StartFailed."""
    with SlackEndpoint() as slack:
        plan = Plan(
            folder=work / "services",
            strategy=strategy,
            reporter_arguments=("--slack-channel", CHANNEL, "--slack-base-url", slack.base_url),
            reporter_env={"GRADLOC_SLACK_TOKEN": TOKEN},
        )
        needs_weights = model == TINY
        tell(Told("pretraining, and services" if needs_weights else "services"))
        with contextlib.ExitStack() as stack:
            folder = work / "pretraining"
            pretraining = _start_pretraining(seed, folder) if needs_weights else None
            if pretraining is not None:
                stack.callback(pretraining.end)
            station = stack.enter_context(Workstation(plan, on_stage=lambda stage: tell(Told(f"{stage} starts"))))
            yield House(station, slack, pretraining, folder)


@contextlib.contextmanager
def staged(house: House, script: Script, work: Path, tell: Callable[[Told], None]) -> Iterator[Played]:
    """Play the script in the folder `work` with the services of `house`. Raises StartFailed."""
    with contextlib.ExitStack() as stack:
        played = Played(work, script.run_id, house.station, house.slack)
        ranks = _start_ranks(script, house.station, work)  # they load torch meanwhile, and wait for the weights
        for rank in ranks:
            stack.callback(rank.end)
        house.wait_ready()
        tell(Told("services are up"))
        house.hand_weights_to(work / "training")
        audience = _Audience(script, played, ranks, tell)
        audience.watch_training()
        if script.cast.judge_waits:
            audience.watch_services()
        judge = _start_judge(script, work)
        stack.callback(judge.end)
        if not script.cast.judge_waits:
            audience.watch_services()
        judge.wait_ready((played.judge_dir / TRUTH).exists, timeout_s=JUDGE_TIMEOUT_S * script.cast.patience)
        yield played


def _start_pretraining(seed: int, folder: Path) -> Process:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gradloc.demo.pretraining", "--seed", str(seed), "--out", str(folder / WEIGHTS)]
    return Process("pretraining", command, folder / "pretraining.log", {"OMP_NUM_THREADS": "1"})


def _start_ranks(script: Script, running: Workstation, work: Path) -> list[Process]:
    judge_dir = work / "judge"
    judge_dir.mkdir(mode=0o700, parents=True)
    (work / "training").mkdir(parents=True)
    # By the environment: a command line is seen by everyone on the machine.
    env = {FAULT_VARIABLE: script.fault, JUDGE_VARIABLE: str(judge_dir), **_threads(script)}
    ranks = []
    for rank in range(script.cast.world_size):
        command = [sys.executable, "-m", "gradloc.demo.trainer", "--work", str(work / "training")]
        command += ["--run", script.run_id, "--seed", str(script.seed), "--steps", str(script.num_steps)]
        command += ["--rank", str(rank), "--world-size", str(script.cast.world_size)]
        command += ["--model", script.model, "--redis", running.redis_url, "--store", running.store_url]
        ranks.append(Process(f"rank {rank}", command, work / "training" / f"rank-{rank}.log", env))
    return ranks


def _start_judge(script: Script, work: Path) -> Process:
    command = [sys.executable, "-m", "gradloc.demo.judge", "--folder", str(work / "judge")]
    command += ["--world-size", str(script.cast.world_size), "--model", script.model]
    return Process("judge", command, work / "judge" / "judge.log", _threads(script))


def _threads(script: Script) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(script.cast.num_threads)}


class _Audience:
    """Watches a run until training has ended and the services have said all they have to say."""

    def __init__(self, script: Script, played: Played, ranks: list[Process], tell: Callable[[Told], None]) -> None:
        self._script = script
        self._played = played
        self._ranks = ranks
        self._tell = tell
        self._num_read = 0

    def watch_training(self) -> None:
        """Until all ranks have ended. Raises StartFailed where one fails."""
        timeout_s = TRAINING_TIMEOUT_S * self._script.cast.patience
        deadline = time.monotonic() + timeout_s
        while any(rank.returncode is None for rank in self._ranks):
            if time.monotonic() > deadline:
                raise StartFailed(f"training did not end within {timeout_s:.0f} s")
            self._look()
            self._check_ranks()
            time.sleep(_POLL_S)
        self._look()
        self._check_ranks()
        training = self._played.work / "training"
        self._played.outcomes = [
            json.loads((training / f"outcome-{rank}.json").read_text()) for rank in range(len(self._ranks))
        ]

    def _check_ranks(self) -> None:
        # The first that fails says why; the others would only time out in a collective.
        for rank in self._ranks:
            if rank.returncode not in (None, 0):
                raise StartFailed(f"{rank.name} ended with code {rank.returncode}: {rank.last_words()}")

    def _look(self) -> None:
        self._read_progress()
        if self._played.redis_killed:
            return
        self._played.station.check()
        kill_at = self._script.kill_redis_at_step
        if kill_at is not None and len(self._played.step_times) > kill_at:
            redis = self._played.station.redis
            assert redis is not None
            redis.process.kill()
            self._played.redis_killed = True
            self._tell(Told("Redis was killed; training goes on"))
            return
        self._ask()

    def _read_progress(self) -> None:
        path = self._played.work / "training" / "progress.jsonl"
        if not path.exists():
            return
        lines = path.read_text().splitlines()
        for line in lines[self._num_read :]:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # half a line: the rest comes with the next look
                break
            self._num_read += 1
            self._played.step_times.append(float(row["ts"]))
            self._tell(Told("training", step=int(row["step"]), grad_norm=float(row["grad_norm"])))

    def _ask(self) -> Played:
        """Look at the incidents; returns what is known by now."""
        answer = _get(f"{self._played.station.reporter_url}/api/v1/incidents?run={self._script.run_id}")
        if answer is None:
            return self._played
        self._played.incidents = answer["incidents"]
        if not self._played.incidents:
            return self._played
        if self._played.alert_at is None:
            self._played.alert_at = time.time()
            self._tell(Told("spike noticed; localizing while training goes on"))
        first = self._played.incidents[-1]["incident_id"]
        incident = _get(f"{self._played.station.reporter_url}/api/v1/incidents/{first}")
        if incident is None:
            return self._played
        self._played.incident = incident
        if incident.get("finding") is not None and self._played.culprit_at is None:
            self._played.culprit_at = time.time()
            self._tell(Told("culprit found"))
        return self._played

    def watch_services(self) -> None:
        """Until they have read the run to its end, and an incident has its finding, in Slack too."""
        if self._played.redis_killed:
            return
        last = int(self._played.outcomes[0]["steps"]) - 1
        url = f"{self._played.station.reporter_url}/api/v1/runs/{self._script.run_id}"
        _wait(lambda: (_get(url) or {}).get("last_step") == last, QUIET_TIMEOUT_S)
        self._ask()
        if not self._played.incidents:
            # An incident would be opened by the detector; give it the time to fold the last steps.
            _wait(lambda: bool(self._ask().incidents), 3.0)
        if self._played.incidents:
            self._tell(Told("localizing"))
            _wait(lambda: self._ask().finding is not None, FINDING_TIMEOUT_S * self._script.cast.patience)
            _wait(self._slack_has_it, QUIET_TIMEOUT_S)

    def _slack_has_it(self) -> bool:
        wanted = ("Culprit", "Verdict") if self._played.finding is not None else ("",)
        return any(word in text for text in self._played.slack_texts for word in wanted)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a while; what did not come by then shows in the verdict."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _get(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except (urllib.error.URLError, OSError, ValueError):
        return None
