"""The whole path through the real services: what `gradloc demo` promises, and what it must not betray.

Trainer ranks, Redis, detector, Ray job, reporter and a Slack-compatible endpoint are all processes or
servers of their own here.
"""

from collections.abc import Iterator

import pytest

from gradloc.demo.performance import House, Played, Script, opened, staged
from gradloc.demo.review import review
from gradloc_proto import codec, streams
from gradloc_proto.redis_bus import RedisBus

STALE = Script("token-mismatch", 1, 60, number=1)
LAYER = Script("layer", 1, 60, number=2)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Services that two runs share."""
    with opened(tmp_path_factory.mktemp("demo"), 1, "attribution", lambda told: None) as services:
        yield services


@pytest.fixture(scope="module")
def mismatch(house: House) -> Iterator[Played]:
    """A run in which one token's reported logp was stale; services are still up."""
    with staged(house, STALE, house.folder.parent / "1", lambda told: None) as played:
        yield played


@pytest.mark.timeout(400)
def test_the_stale_token_is_found_and_proved(mismatch: Played):
    result = review(STALE, mismatch)
    assert result["right"], result
    assert result["verdict"] == "token"
    assert result["norm_without"] <= result["limit"]
    assert abs(result["checksum"] - 1) <= 0.01
    assert result["replay_rel_error"] <= 1e-3
    assert result["steps_during_localization"] >= 3
    assert result["training_steps"] == 60
    assert result["events_dropped"] == 0
    assert result["incidents"] == 1
    assert result["truth"]["share"] > 0.5 > result["truth"]["runner_up_share"]


def test_slack_and_rest_name_the_culprit(mismatch: Played):
    result = review(STALE, mismatch)
    found = result["found"]
    where = f"rank {found['rank']} · micro-batch {found['micro_batch']} · sequence {found['sequence']}"
    assert len(mismatch.slack_texts) == 1, "one message, edited in place"
    assert where in result["slack"]
    assert f'`"{found["token_text"]}"`' in result["slack"]
    assert mismatch.incident is not None and where in mismatch.incident["text"]


def test_nothing_but_the_judges_folder_betrays_what_was_planted(house: House, mismatch: Played, betraying):
    told = []
    bus = RedisBus(mismatch.station.redis_url)
    run_id = mismatch.incidents[0]["run_id"]
    for entry in bus.read_last(streams.REGISTRY, count=100):
        told.append(("registry", entry.data.decode()))
    num_of = {}
    for name in ("steps", "control", "limits", "incidents"):
        entries = bus.read_last(streams.stream(run_id, name), count=10_000)
        num_of[name] = len(entries)
        told += [(name, codec.decode(entry.data).model_dump_json()) for entry in entries]
    bus.close()
    assert num_of["steps"] > 60 and num_of["incidents"] > 0
    root = house.folder.parent
    files = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "judge"]
    names = {path.name for path in files}
    assert {"manifest.json", "rank-0.safetensors", "rank-0.log", "progress.jsonl", "detector.log"} <= names
    kinds = (".json", ".jsonl", ".log")
    told += [(path.name, path.read_text(errors="replace")) for path in files if path.suffix in kinds]
    told += [(path.name, str(path.relative_to(root))) for path in files]
    betrayals = [
        (where, word) for where, text in told for word in betraying if word in text.replace("default", "").lower()
    ]
    assert not betrayals


@pytest.mark.timeout(400)
def test_exploding_layers_are_found_at_the_planted_position(house: House, mismatch: Played):
    with staged(house, LAYER, house.folder.parent / "2", lambda told: None) as played:
        result = review(LAYER, played)
    assert result["right"], result
    assert result["layers_exploding"] == [0, 1]
    assert len(result["module_kinds_exploding"]) > 1
    assert result["profile_peak"]["position"] == result["truth"]["position"]
    assert result["truth"]["token"] > result["truth"]["position"]
    assert result["norm_without"] <= result["limit"]
    assert abs(result["checksum"] - 1) <= 0.01
    assert result["replay_rel_error"] <= 1e-3
    assert len(mismatch.slack_texts) == 1, "each run has its own message"
