"""A job's driver on a Ray pool: argv are the snapshot, the probes' store and the number of processes.

One line: the finding, or `failed: ` and why.
"""

import sys

from gradloc_localizer.driver import Options
from gradloc_localizer.ray_processes import explain_on_ray
from gradloc_localizer.split_processes import SplitFailed

snapshot, probes, num_processes = sys.argv[1:]
options = Options(device="cpu", num_threads=1, num_processes=int(num_processes), probes=probes)
try:
    _, finding = explain_on_ray(snapshot, options, lambda _stage, _fraction: None)
    sys.stdout.write(f"{finding.model_dump_json()}\n")
except SplitFailed as error:
    sys.stdout.write(f"failed: {error}\n")
