"""One driver: argv are the snapshot, the probes' store and the number of replicas.

The Ray job's, but that it waits for its replicas: the step is over before they come, else, and nobody would share it.
"""

import contextlib
import json
import sys
from collections.abc import Iterator

from gradloc_localizer.driver import Options, explain
from gradloc_localizer.ray_replicas import RayReplicas, ray_replicas


@contextlib.contextmanager
def started_replicas(url: str, options: Options) -> Iterator[RayReplicas]:
    with ray_replicas(url, options) as made:
        made.until_started()
        yield made


def main() -> None:
    snapshot, probes, num_replicas = sys.argv[1:]
    options = Options(device="cpu", num_threads=1, num_replicas=int(num_replicas), probes=probes)
    _, finding = explain(snapshot, options, replicas=started_replicas)
    # A line of its own: Ray writes there, too.
    sys.stdout.write("\n" + json.dumps(json.loads(finding.model_dump_json(exclude={"cost"}))) + "\n")


if __name__ == "__main__":
    main()
