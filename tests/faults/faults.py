"""What may strike, by the names of issue lists and logs."""

import process_faults as process
import ray_faults as ray
import redis_faults as of_redis
from fault import Fault


def _named(*faults: Fault) -> dict[str, Fault]:
    return {one.__name__.replace("_", "-"): one for one in faults}


FAULTS = _named(
    process.kill_detector, process.kill_both_detectors, process.pause_detector, process.cut_detector,
    process.kill_reporter, process.pause_reporter, process.kill_trainer, process.pause_trainer, process.cut_trainer,
    process.break_slack, process.lock_database, process.jump_clock,
    of_redis.restart_redis, of_redis.pause_redis, of_redis.slow_redis, of_redis.empty_redis, of_redis.old_redis,
    of_redis.fail_over_redis, of_redis.full_redis, of_redis.read_only_redis, of_redis.repeat_messages,
    of_redis.corrupt_messages,
)  # fmt: skip
RAY_FAULTS = _named(ray.kill_ray, ray.kill_job_driver, ray.kill_job_worker, ray.pause_job)
STORE_FAULTS = _named(ray.slow_store, ray.failing_store, ray.full_store, ray.late_store)
ALL = FAULTS | RAY_FAULTS | STORE_FAULTS
# One at a time: what one of them heals must not be another's harm.
EXCLUSIVE = {name: name.split("-")[-1].rstrip("s") for name in ALL} | dict.fromkeys(RAY_FAULTS, "ray")
