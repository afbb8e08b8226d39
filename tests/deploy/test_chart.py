"""The chart, rendered for every file in ci/: valid, restricted, whole, and wrong values refused by name."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from gradloc_detector.command import detector
from gradloc_localizer.__main__ import main as localizer
from gradloc_localizer.app_settings import AppSettings
from gradloc_proto import rights
from gradloc_reporter.command import reporter

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/k8s/gradloc"
CASES = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))
CRDS = Path(os.environ.get("GRADLOC_SHARED", Path(__file__).parents[3] / "shared")) / "crds"
ROUTES = "gateway.networking.k8s.io/"
OURS = ("detector", "reporter", "localizer")


def helm() -> str:
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    assert found is not None, "helm is not there; make test puts it beside Python (.ci/helm)"
    return found


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [helm(), "template", "release", str(CHART), "--namespace", "gradloc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@cache
def rendered(case: str) -> tuple[dict[str, Any], ...]:
    done = template("--values", str(CHART / "ci" / case))
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def pods(documents: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod template with its metadata, by a name."""
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        match document["kind"]:
            case "Pod":
                yield name, document
            case "Deployment" | "StatefulSet" | "Job":
                yield name, document["spec"]["template"]
            case "RayCluster" | "RayService":
                cluster = document["spec"].get("rayClusterConfig", document["spec"])
                yield f"{name}/head", cluster["headGroupSpec"]["template"]
                for group in cluster["workerGroupSpecs"]:
                    yield f"{name}/{group['groupName']}", group["template"]


def test_there_are_cases() -> None:
    assert len(CASES) >= 5


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """The library reads megabytes of definitions for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.mark.parametrize("case", CASES)
def test_lint_and_every_kubernetes_version_accept_it(case: str) -> None:
    command = [helm(), "lint", "--strict", "--quiet", str(CHART), "--values", str(CHART / "ci" / case)]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    core = [document for document in rendered(case) if not custom(document)]
    assert len(core) > 5
    for version in ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"):
        for document in core:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_custom_resources_fit_their_definitions(case: str) -> None:
    found = [document for document in rendered(case) if custom(document)]
    if not found:
        assert case in ("small-values.yaml", "external-ray-values.yaml")
        return
    if not CRDS.is_dir():
        pytest.skip(f"no CRDs at {CRDS}; set GRADLOC_SHARED")
    for document in found:
        if not document["apiVersion"].startswith(ROUTES):  # the Gateway API's definition is not at hand
            jsonschema.validate(document, definition(document["kind"], document["apiVersion"].split("/")[1]))


def custom(document: dict[str, Any]) -> bool:
    return str(document["apiVersion"]).startswith(("ray.io/", "monitoring.coreos.com/", "keda.sh/", ROUTES))


@cache
def definition(kind: str, version: str) -> dict[str, Any]:
    text = (CRDS / f"{kind.lower()}s.yaml").read_text()
    served = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [strict(one["schema"]["openAPIV3Schema"]) for one in served if one["name"] == version]
    assert isinstance(schema, dict)
    return schema


def strict(node: Any) -> Any:
    """The OpenAPI schema as JSON Schema that knows no field beyond those listed."""
    if isinstance(node, list):
        return [strict(value) for value in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not key.startswith("x-kubernetes") and key != "nullable"}
    out = {key: strict(value) for key, value in kept.items()}
    if "(?i)" in str(out.get("pattern")):  # Go takes flags anywhere
        out["pattern"] = "(?i)" + out["pattern"].replace("(?i)", "")
    if node.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    keeps = node.get("x-kubernetes-preserve-unknown-fields") or node.get("x-kubernetes-embedded-resource")
    if isinstance(node.get("properties"), dict) and not keeps and "additionalProperties" not in node:
        # The root's metadata is an object whose fields the API server knows.
        out["additionalProperties"] = False
    if node.get("nullable") and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_pod_keeps_the_restricted_profile(case: str) -> None:
    found = list(pods(rendered(case)))
    assert found
    for name, pod in found:
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] >= 1000, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        fixed = ("shared-volume-values.yaml", "platform-values.yaml")  # pools that do not scale
        scales = name.endswith("/head") and ("RayService" in name or case not in fixed)
        assert spec["automountServiceAccountToken"] is scales, name  # KubeRay's autoscaler alone asks the API server
        assert spec["enableServiceLinks"] is False, name
        kinds = {kind for volume in spec.get("volumes", ()) for kind in volume} - {"name"}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]} and not security.get("privileged"), name
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"], name


@pytest.mark.parametrize("case", CASES)
def test_every_reference_resolves_and_no_secret_is_in_the_open(case: str) -> None:
    documents = rendered(case)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    given = json.dumps(yaml.safe_load((CHART / "ci" / case).read_text()) or {}) + json.dumps(values)
    there: dict[str, set[str]] = {}
    for document in documents:
        there.setdefault(document["kind"], set()).add(document["metadata"]["name"])
    accounts = there["ServiceAccount"]
    generated = {d["metadata"]["name"]: set(d["data"]) for d in documents if d["kind"] == "Secret"}
    labels = [pod["metadata"]["labels"] for _, pod in pods(documents)]
    for name, pod in pods(documents):
        spec = pod["spec"]
        if "serviceAccountName" in spec:
            assert spec["serviceAccountName"] in accounts, name
        mounted = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", ())}
        claimed = {"data"} if name.startswith("StatefulSet") else set()  # of volumeClaimTemplates
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())} | claimed, name
        for key, secret in keys_of(spec):
            assert secret not in generated or key in generated[secret], f"{name}: {secret} has no key {key}"
        for container in spec["containers"]:
            image = container["image"].rpartition(":")[0].rpartition("/")[2]
            assert image == "redis" or (ROOT / "services" / image / "Dockerfile").exists(), f"{name}: {image}"
        for secret in secrets_of(spec):
            assert secret in there.get("Secret", set()) or f'"{secret}"' in given, f"{name}: secret {secret}"
        for volume in spec.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in there.get("PersistentVolumeClaim", set()) or f'"{claim}"' in given
        for container in spec["containers"]:
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for kind in ("httpGet", "tcpSocket"):
                    asked = container.get(probe, {}).get(kind)
                    assert asked is None or asked["port"] in ports, name
            for variable in re.findall(r"\$\((\w+)\)", json.dumps([container.get("args"), container.get("env")])):
                assert variable in {entry["name"] for entry in container["env"]}, name
    for document in rendered(case):
        selector = selector_of(document)
        if selector:
            assert any(selector.items() <= label.items() for label in labels), document["metadata"]["name"]
        if document["kind"] == "Service":
            chosen = [pod for _, pod in pods(rendered(case)) if selector.items() <= pod["metadata"]["labels"].items()]
            names = {port["name"] for pod in chosen for c in pod["spec"]["containers"] for port in c.get("ports", ())}
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= names
        if document["kind"] == "ServiceMonitor":
            services = [d for d in rendered(case) if d["kind"] == "Service"]
            ports = {
                port["name"]
                for d in services
                if document["spec"]["selector"]["matchLabels"].items() <= d["metadata"]["labels"].items()
                for port in d["spec"]["ports"]
            }
            assert {endpoint["port"] for endpoint in document["spec"]["endpoints"]} <= ports
        if document["kind"] == "ScaledObject":
            assert document["spec"]["scaleTargetRef"]["name"] in there["Deployment"]
        if document["kind"] == "HTTPRoute":
            (target,) = document["spec"]["rules"][0]["backendRefs"]
            (service,) = [
                d for d in rendered(case) if (d["kind"], d["metadata"]["name"]) == ("Service", target["name"])
            ]
            assert target["port"] in [port["port"] for port in service["spec"]["ports"]]
        if document["kind"] == "Ingress":
            backend = document["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
            assert backend["name"] in there["Service"] and backend["port"] == {"name": "http"}
    for document in rendered(case):
        if document["kind"] != "Secret":
            shown = json.dumps(document).replace("REDIS_PASSWORD", "")
            assert "password" not in shown.lower(), document["metadata"]["name"]
            for name, value in secret_values(documents):
                assert value not in shown, f"{document['metadata']['name']} shows {name}"


def keys_of(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every key of a secret that a pod names, with the secret."""
    for volume in spec.get("volumes", ()):
        for item in volume.get("secret", {}).get("items", ()):
            yield item["key"], volume["secret"]["secretName"]
    for container in spec["containers"]:
        for entry in container.get("env", ()):
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                yield reference["key"], reference["name"]


def secret_values(documents: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, str]]:
    for document in documents:
        for key, value in document.get("data", {}).items() if document["kind"] == "Secret" else ():
            yield f"{document['metadata']['name']}/{key}", base64.b64decode(value).decode()
            yield f"{document['metadata']['name']}/{key}", value


def secrets_of(spec: dict[str, Any]) -> Iterator[str]:
    yield from (secret["name"] for secret in spec.get("imagePullSecrets", ()))
    yield from (volume["secret"]["secretName"] for volume in spec.get("volumes", ()) if "secret" in volume)
    for container in spec["containers"]:
        yield from (source["secretRef"]["name"] for source in container.get("envFrom", ()))
        for entry in container.get("env", ()):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                yield reference["name"]


def selector_of(document: dict[str, Any]) -> dict[str, str]:
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            return dict(spec["selector"])
        case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
            return dict(spec["selector"]["matchLabels"])
        case "NetworkPolicy":
            return dict(spec["podSelector"].get("matchLabels", {}))
    return {}


@pytest.mark.parametrize("case", CASES)
def test_the_commands_know_every_option_that_the_chart_gives_them(case: str) -> None:
    told = {
        "detector": CliRunner().invoke(detector, ["--help"]).output,
        "reporter": CliRunner().invoke(reporter, ["--help"]).output,
    }
    seen = set()
    for name, pod in pods(rendered(case)):
        for container in pod["spec"]["containers"]:
            if container["name"] in told:
                assert container["command"] == ["python", "-m", f"gradloc_{container['name']}"]
                for option in container["args"]:
                    assert option.split("=")[0] in told[container["name"]], f"{name}: {option}"
                seen.add(container["name"])
    assert seen == set(told)


def test_the_what_if_app_is_configured_as_it_reads_and_found_where_the_operator_puts_it() -> None:
    documents = rendered("whatif-values.yaml")
    (service,) = [one for one in documents if one["kind"] == "RayService"]
    (app,) = (config := yaml.safe_load(service["spec"]["serveConfigV2"]))["applications"]
    settings = AppSettings(**app["args"])
    assert (settings.replicas_max, settings.idle_s, settings.num_gpus) == (2, 300, 1)
    module, _, function = app["import_path"].partition(":")
    assert f"def {function}(args: AppSettings)" in Path(str(find_spec(module).origin)).read_text()  # type: ignore[union-attr]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (0, 0, settings.replicas_max)
    (reporter_pod,) = [pod for name, pod in pods(documents) if "Deployment/release-gradloc-reporter" in name]
    (container,) = reporter_pod["spec"]["containers"]
    port = config["http_options"]["port"]
    url = f"http://{service['metadata']['name']}-serve-svc:{port}{app['route_prefix']}"
    assert f"--whatif-url={url}" in container["args"]
    keys = {name: pod["spec"]["containers"][0].get("env", ()) for name, pod in pods(documents)}
    tokens = [one["valueFrom"] for env in keys.values() for one in env if one["name"] == "GRADLOC_WHATIF_TOKEN"]
    assert len(tokens) == 3 and all(token == tokens[0] for token in tokens)  # reporter, head, worker


def options_of(command: click.Command) -> set[str]:
    return {option for one in command.params if isinstance(one, click.Option) for option in one.opts}


def test_every_setting_that_a_service_reads_can_be_set() -> None:
    """By an argument or a variable of the pod; what the chart decides itself is listed with its reason."""
    given = json.dumps([rendered(case) for case in CASES])
    decided = {
        "--redis": "by GRADLOC_REDIS_URL, which does not show in a list of processes",
        **{f"--{name}": "by the detector, in the job's command" for name in ("run", "attempt", "incident", "snapshot")},
        "--localization-attempt": "by the detector, in the job's command",
    }
    for command in (detector, reporter, localizer):
        for option in options_of(command) - set(decided):
            variable = next(one.envvar for one in command.params if option in one.opts)
            said = {option, f"{option}="} | ({str(variable)} if variable else set())
            assert any(word in given for word in said), f"{command.name}: {option}"
    for file in (ROOT / "services").glob("*/src/**/*.py"):
        for variable in re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", file.read_text()):
            # The detector's, for one job; and what no model may be asked for.
            assert variable in given or variable in ("GRADLOC_REFERENCE", "HF_HUB_OFFLINE", "RAY_ADDRESS"), (
                file.name,
                variable,
            )


def test_redis_users_have_the_rights_of_their_role_and_no_password_in_the_open() -> None:
    (secret,) = [
        one["data"]
        for one in rendered("whole-values.yaml")
        if one["kind"] == "Secret" and one["metadata"]["name"] == "release-gradloc-redis"
    ]
    lines = [line.split() for line in base64.b64decode(secret["users.acl"]).decode().splitlines()]
    probe = ["user", "probe", "on", "nopass", "resetchannels", "-@all", "+ping"]  # the kubelet's
    assert lines[:2] == [["user", "default", "off"], probe]
    users = {words[1]: words for words in lines[2:]}
    assert set(users) == {"detector", "reporter", "localizer", "trainer-team-a", "trainer-one"}
    for role in ("detector", "reporter", "localizer"):
        digest = sha256(base64.b64decode(secret[role])).hexdigest()
        assert users[role][2:] == ["on", f"#{digest}", *rights.rules(cast(rights.Role, role))]
    for name, runs in (("trainer-team-a", "team-a-*"), ("trainer-one", "one-run")):
        assert users[name][4:] == [*rights.rules("trainer", runs=runs)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "detector.replica=2"], "replica"),
        (["--set", "detector.replicas=-1"], "/detector/replicas"),
        (["--set", "reporter.replicas=2"], "/reporter/replicas"),
        (["--set", "redis.external.existingSecret=x"], "/redis/external/existingSecret"),
        (["--set", "redis.enabled=false"], "redis.external.existingSecret is needed"),
        (["--set", "reporter.database.kind=postgresql"], "reporter.database.existingSecret is needed"),
        (["--set", "reporter.slack.channel=#alerts"], "/reporter/slack/channel"),
        (["--set", "reporter.slack.channel=C0123456789"], "reporter.slack.existingSecret is needed"),
        (["--set", "localizer.mode=external"], "localizer.external.address is needed"),
        (["--set", "localizer.mode=sometimes"], "/localizer/mode"),
        (["--set", "ingress.enabled=true"], "ingress.host is needed"),
        (["--set", "redis.storage=lots"], "/redis/storage"),
        (["--set", "redis.trainers[0].name=a,redis.trainers[0].runs=a*b"], "/redis/trainers/0/runs"),
        (["--set", "redis.trainers[0].name=a"], "runs"),
        (["--set", "localizer.replicas=9"], "/localizer/replicas"),
        (["--set", "localizer.split=0"], "/localizer/split"),
        (["--set", "localizer.split=2,localizer.replicas=2"], "localizer.split and localizer.replicas"),
        (["--set", "localizer.split=5"], "localizer.split is more than"),
        (["--set", "localizer.probes=probes"], "/localizer/probes"),
        (["--set", "localizer.device=tpu"], "/localizer/device"),
        (["--set", "localizer.workers.min=5"], "localizer.workers.min is more than"),
        (["--set", "localizer.workers.queueName=q"], "localizer.workers.queueName: Kueue"),
        (["--set", "detector.keda.enabled=true"], "detector.keda.prometheusAddress is needed"),
        (["--set", "detector.keda.enabled=true,detector.replicas=9"], "detector.keda.maxReplicas"),
        (["--set", "gateway.enabled=true"], "gateway.parentRefs is needed"),
        (["--set", "detector.sensitivity=0"], "/detector/sensitivity"),
        (["--set", "whatif.enabled=true"], "whatif.store is needed"),
        (["--set", "whatif.enabled=true,whatif.store=s3://b,whatif.url=http://x:1/y"], "whatif.url is for"),
        (["--set", "whatif.replicasMax=0"], "/whatif/replicasMax"),
        (["--set", "whatif.store=nowhere"], "/whatif/store"),
    ],
)
def test_wrong_values_are_refused_by_the_name_of_the_key(arguments: list[str], says: str) -> None:
    done = template(*arguments)
    assert done.returncode != 0
    assert says in done.stderr


def test_every_value_is_documented_and_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], known: dict[str, Any], path: str) -> None:
        assert set(values) == set(known["properties"]) - {"global"}, path
        for key, value in values.items():
            if isinstance(value, dict) and "properties" in known["properties"][key]:
                compare(value, known["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


def test_the_readme_is_that_of_the_values() -> None:
    script = CHART.parent / "readme.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for key in ("`reporter.replicas`", "`localizer.workers.gpus`", "`networkPolicy.egressPorts`"):
        assert key in (CHART / "README.md").read_text()


def test_parts_that_need_no_torch_do_not_install_it() -> None:
    root = Path(__file__).parents[2]
    for part in OURS:
        text = (root / "services" / part / "Dockerfile").read_text()
        assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
        assert (" ./sdk" in text) is (part == "localizer")
