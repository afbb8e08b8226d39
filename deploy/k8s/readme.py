"""Writes the chart's README from values.yaml: every `# --` comment beside its key and default.

python deploy/k8s/readme.py          # write it
python deploy/k8s/readme.py --check  # exit code 1 when it has drifted
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "gradloc"
INTRODUCTION = """# The chart `gradloc`

Detector, reporter, a localizer pool under KubeRay and, unless you bring your own, Redis.

    helm install gradloc deploy/k8s/gradloc --namespace gradloc --create-namespace --values my-values.yaml

Needs Kubernetes 1.30 or newer; the KubeRay operator for `localizer.mode: rayCluster`; the Prometheus
operator for `metrics.serviceMonitor` and `metrics.rules`. Examples of values: [ci/](ci). No manifest
holds a secret of yours: name existing ones. Written by `deploy/k8s/readme.py`; change `values.yaml`.

What was tried, and how: every file of ci/ is rendered, linted and validated against the schemas of
Kubernetes 1.30 to 1.37 and of the operators (not of the Gateway API); the containers of small-values and
whole-values are started as rendered, and a spike goes through them. No cluster was there to install it on.
Sizing, upgrades, failures, security: docs/operating.md.

| key | default | meaning |
|---|---|---|
"""


def documented(text: str) -> dict[str, str]:
    """The comments `# --` of values.yaml, by dotted key."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    found: dict[str, str] = {}
    for line in text.splitlines():
        said = re.match(r"^\s*# (-- )?(.*)$", line)
        if said:
            comment = [said[2]] if said[1] else ([*comment, said[2]] if comment else [])
            continue
        key = re.match(r"^(\s*)([A-Za-z]\w*):", line)
        if key:
            depth = len(key[1])
            path = [*[step for step in path if step[0] < depth], (depth, key[2])]
            if comment:
                found[".".join(name for _, name in path)] = " ".join(comment)
        comment = []
    return found


def leaves(values: dict[str, Any], comments: dict[str, str], path: str = "") -> list[tuple[str, Any]]:
    """Keys that one sets, in the file's order: down to scalars, lists and maps without keys of their own."""
    out: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{path}{key}"
        inner = any(other.startswith(f"{name}.") for other in comments)
        if isinstance(value, dict) and value and (inner or name not in comments) and key not in ("requests", "limits"):
            out += leaves(value, comments, f"{name}.")
        else:
            out.append((name, value))
    return out


def readme() -> str:
    text = (CHART / "values.yaml").read_text()
    comments = documented(text)
    rows = [
        f"| `{name}` | `{json.dumps(value)}` | {comments.get(name, '')} |"
        for name, value in leaves(yaml.safe_load(text), comments)
    ]
    return INTRODUCTION + "\n".join(rows) + "\n"


def main() -> int:
    file = CHART / "README.md"
    if "--check" in sys.argv[1:]:
        if file.read_text() != readme():
            sys.stderr.write(f"{file.name} of the chart has drifted; run python deploy/k8s/readme.py\n")
            return 1
        return 0
    file.write_text(readme())
    return 0


if __name__ == "__main__":
    sys.exit(main())
