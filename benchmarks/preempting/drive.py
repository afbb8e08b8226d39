"""One driver, as the Ray job runs it: argv are the snapshot, the probes' store and the number of replicas."""

import json
import sys

from gradloc_localizer.driver import Options, explain
from gradloc_localizer.ray_replicas import ray_replicas


def main() -> None:
    snapshot, probes, num_replicas = sys.argv[1:]
    options = Options(device="cpu", num_threads=1, num_replicas=int(num_replicas), probes=probes)
    _, finding = explain(snapshot, options, replicas=ray_replicas)
    sys.stdout.write(json.dumps(json.loads(finding.model_dump_json(exclude={"cost"}))))


if __name__ == "__main__":
    main()
