"""A real replica that is promoted without the last writes: what was lost is noticed, told, and nothing is stuck."""

import pytest
import redis

from gradloc_detector.service import DetectorService, Settings
from gradloc_proto import codec, streams
from gradloc_proto.messages import RunStarted
from gradloc_proto.redis_bus import RedisBus

SETTINGS = Settings(lease_ttl_s=5.0, registry_s=0.02, loss_check_s=0.2, poll_s=0.01, poll_idle_max_s=0.05)


@pytest.fixture
def pair(own_redis, redis_server_type, tmp_path, eventually):
    """A master and its replica, in step."""
    folder = tmp_path / "replica"
    folder.mkdir()
    replica = redis_server_type(folder, options=("--replicaof", "127.0.0.1", str(own_redis.port)))
    replica.start()
    with redis.Redis(port=replica.port) as client:
        eventually(lambda: client.info("replication")["master_link_status"] == "up", what="replication")
    yield own_redis, replica
    replica.stop()


def publish(bus, story, *messages):
    data = [codec.encode(message) for message in messages]
    bus.append(streams.stream(story.run, "steps"), data, length_max=100_000)


def turns(service, count=12):
    import time

    for _ in range(count):
        service.turn()
        time.sleep(0.03)


@pytest.mark.parametrize("is_idle", [True, False], ids=["nothing-new", "training-goes-on"])
def test_a_replica_promoted_without_the_last_writes_is_noticed_and_told(pair, story, eventually, is_idle):
    master, replica = pair
    bus = RedisBus(master.url)
    bus.append(streams.REGISTRY, [codec.encode(RunStarted(run_id=story.run, ts=1.0))], length_max=10)
    publish(bus, story, RunStarted(run_id=story.run, ts=1.0), *story.steps(0, 60))
    service = DetectorService(bus, settings=SETTINGS)
    turns(service)
    with redis.Redis(port=master.port) as one, redis.Redis(port=replica.port) as other:
        assert one.wait(1, 5_000) == 1
        other.replicaof("NO", "ONE")  # from here on it hears nothing
    publish(bus, story, *story.steps(61, 100), story.spike(101))
    turns(service)
    assert [message.type for message in told(bus, story)] == ["incident_opened"]
    # The replica takes the master's place: same address, older data.
    master.stop()
    replica.stop()
    heir = type(master)(replica.folder, port=master.port)
    heir.start()
    try:
        if not is_idle:
            publish(RedisBus(heir.url), story, *story.steps(102, 130), story.spike(131))
        for _ in range(200):
            try:
                turns(service, 2)
            except ConnectionError:  # the connections to the old one
                continue
            if any("promoted" in getattr(message, "reason", "") or "read further" in getattr(message, "reason", "")
                   for message in told(bus, story)):  # fmt: skip
                break
        losses = [message for message in told(bus, story) if message.type == "stream_gap_noticed"]
        assert any("Redis lost" in message.reason for message in losses)
        assert service.metrics.registry.get_sample_value("gradloc_detector_losses_noticed_total") >= 1.0
        publish(bus, story, *story.steps(140, 170), story.spike(171))
        turns(service)
        spikes = [message.spike.step for message in told(bus, story) if hasattr(message, "spike")]
        assert 171 in spikes and (is_idle or 131 in spikes)
        if not is_idle:
            # The steps that only the old master had are told as missing.
            turns(service)
            gaps = [(message.first_step, message.last_step) for message in told(bus, story)
                    if message.type == "stream_gap_noticed"]  # fmt: skip
            assert (61, 101) in gaps
        service.close()
    finally:
        heir.stop()
        bus.close()


def told(bus, story):
    entries = bus.read_last(streams.stream(story.run, "incidents"), count=1_000)
    return [codec.decode(entry.data) for entry in entries]
