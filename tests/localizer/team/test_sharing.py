"""A localization cut into shards: the same finding whoever answers them, whoever dies, whatever was kept before."""

import copy
import random
import threading
from pathlib import Path

import pytest
import torch

from gradloc.localization import localize
from gradloc.replay import coefficients_of, replay
from gradloc.store import Store, StoreUnavailable
from gradloc.team import Answer, answer, shards_of
from gradloc_localizer.kept_probes import KeptProbes
from gradloc_localizer.sharing import Alone, shared

SHARES = 1e-5


class Killed(BaseException):
    pass


class Copies:
    """Replicas with copies of the model, in this process. One in `dies` answers is lost; they answer in any order."""

    def __init__(self, step, num, seed=0, dies=0.0):
        self._policies = [step.policy() for _ in range(num)]
        for policy in self._policies:
            policy.model = copy.deepcopy(policy.model)
            policy.parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._batches = step.placed
        self._random = random.Random(seed)
        self._dies = dies
        self._running = []

    def offer(self, number, question, gradient):
        if len(self._running) == len(self._policies):
            return False
        self._running.append((number, question, gradient))
        return True

    def collect(self, *, wait):
        if not self._running or (not wait and self._random.random() < 0.5):
            return []
        number, question, gradient = self._running.pop(self._random.randrange(len(self._running)))
        if self._random.random() < self._dies:
            return [(number, None)]
        return [(number, answer(self._random.choice(self._policies), self._batches, question, gradient))]


def explained(step, kept=None, replicas=None):
    """The finding, and who answered."""
    seen, policy = [], step.policy()
    shared(policy, step.placed, "step", kept, replicas, seen.append)
    finding = localize(policy, step.placed, step.facts())
    return finding, seen[0]


def told(finding):
    """All of it but what it cost."""
    return finding.model_dump_json(exclude={"cost"})


@pytest.fixture(scope="module")
def step(trainer):
    """Two culprits, so that several questions follow each other."""
    fault = trainer.together(trainer.stale(9.0), trainer.stale(8.0, rank=0, row=1, column=4))
    return trainer.faulty(trainer.model(num_layers=2), fault, num_rows=3, num_response=8)


@pytest.fixture(scope="module")
def alone(step):
    return explained(step)[0]


def test_shards_hold_each_row_once_whatever_the_shapes(step):
    shards = shards_of(step.placed)
    rows = [row for shard in shards for row in shard]
    assert len(rows) == len(set(rows)) == sum(len(placed.batch.ids_BT) for placed in step.placed)
    assert 1 < len(shards) <= 8


def test_a_team_finds_what_one_process_finds(step, alone):
    plain = localize(step.policy(), step.placed, step.facts())
    assert alone.verdict == plain.verdict == "token"
    for one, other in zip(alone.culprits, plain.culprits, strict=True):
        assert (one.rank, one.micro_batch, one.sequence, one.token) == (
            other.rank,
            other.micro_batch,
            other.sequence,
            other.token,
        )
        assert one.share == pytest.approx(other.share, abs=SHARES)
    assert alone.sequence_view.shares == pytest.approx(plain.sequence_view.shares, abs=SHARES)
    assert alone.certificate.norm_without == pytest.approx(plain.certificate.norm_without, rel=SHARES)
    assert alone.cost.num_backwards >= plain.cost.num_backwards > 0


@pytest.mark.parametrize("num", [1, 2, 3])
def test_more_replicas_and_dying_ones_change_nothing(step, alone, num):
    for seed, dies in ((0, 0.0), (1, 0.5)):
        assert told(explained(step, replicas=Copies(step, num, seed, dies))[0]) == told(alone)


class KilledAfter(KeptProbes):
    """The driver ends when so many answers were kept."""

    def __init__(self, store, num):
        super().__init__(store)
        self._left = num

    def put(self, key, told):
        if self._left == 0:
            raise Killed
        self._left -= 1
        super().put(key, told)


def test_whoever_is_killed_goes_on_where_it_was(step, alone, tmp_path):
    _, everything = explained(step, KeptProbes(Store(f"file://{tmp_path}/all")))
    assert everything.num_asked > 12
    for num in sorted(random.Random(1).sample(range(everything.num_asked), 4)):
        store = Store(f"file://{tmp_path}/{num}")
        with pytest.raises(Killed):
            explained(step, KilledAfter(store, num))
        files = {path: path.stat().st_mtime_ns for path in Path(tmp_path, str(num)).glob("*.safetensors")}
        assert len(files) == num
        finding, again = explained(step, KeptProbes(store))
        assert told(finding) == told(alone)
        assert again.num_asked == everything.num_asked - num
        assert {path: path.stat().st_mtime_ns for path in files} == files  # none was asked again


def test_a_kept_answer_that_is_broken_or_anothers_is_asked_again(step, alone, tmp_path):
    store = Store(f"file://{tmp_path}/kept")
    _, first = explained(step, KeptProbes(store))
    files = sorted(Path(tmp_path, "kept").glob("*.safetensors"))
    contents = [b"", b"\x00" * 100, files[0].read_bytes()[:-1], files[1].read_bytes()]
    for path, content in zip(files[2:], contents, strict=False):
        path.write_bytes(content)
    finding, again = explained(step, KeptProbes(store))
    assert told(finding) == told(alone)
    assert 3 <= again.num_asked < first.num_asked


def test_two_drivers_of_one_incident_do_no_harm(step, alone, tmp_path):
    found, failed = {}, []

    def drive(name):
        try:
            # A model of its own, as a process has: the fixture's is shared by threads here.
            own = copy.copy(step)
            own.model = copy.deepcopy(step.model)
            found[name] = told(explained(own, KeptProbes(Store(f"file://{tmp_path}/both")))[0])
        except Exception as error:  # noqa: BLE001 - told by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=drive, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert found == {"one": told(alone), "other": told(alone)}


class Away(Store):
    def read(self, name, *, bytes_max):
        raise StoreUnavailable("away")

    def write(self, name, data):
        raise StoreUnavailable("away")


def test_a_store_that_is_away_costs_a_line(step, alone, caplog):
    finding, sharing = explained(step, KeptProbes(Away("memory://away")))
    assert told(finding) == told(alone) and sharing.num_kept == 0
    assert [record.message for record in caplog.records] == ["probes are not kept: away"]


@pytest.mark.parametrize("what", ["nan", "overflow"])
def test_what_is_not_finite_is_found_alike(trainer, what):
    step = trainer.faulty(
        trainer.model(num_layers=2), trainer.stale(float("inf")) if what == "nan" else trainer.extra(3e38)
    )
    assert told(explained(step, replicas=Copies(step, 2))[0]) == told(explained(step)[0])


def test_a_step_of_one_short_row_is_one_shard(trainer):
    step = trainer.step(trainer.model(), num_ranks=1, num_micro_batches=1, num_rows=1)
    finding, _ = explained(step, replicas=Copies(step, 3))
    assert told(finding) == told(explained(step)[0])


def test_a_team_counts_the_work_that_was_done_and_no_other(step, tmp_path):
    kept = KeptProbes(Store(f"file://{tmp_path}/work"))
    first, again = explained(step, kept)[0].cost, explained(step, kept)[0].cost
    assert first.num_backwards > again.num_backwards  # the second one reads what the first one did
    policy = step.policy()
    shared(policy, step.placed, "step", None, Alone())
    replay(policy, step.placed, coefficients_of(step.placed))
    assert policy.meter.steps == pytest.approx(1.0, rel=0.25)


def test_an_answer_without_derivatives_is_kept_as_such(tmp_path):
    kept = KeptProbes(Store(f"file://{tmp_path}/none"))
    kept.put("a", Answer({}, exists=False))
    kept.put("b", Answer({"row.0.0": torch.ones(3)}))
    assert kept.get("a").exists is False and kept.get("b").exists and kept.get("c") is None
