"""A cluster of one machine for the rendered chart: pods as namespaces of Linux, services as small proxies.

What a kubelet does with a rendered manifest is done here with it: commands, arguments, environment,
secrets and volumes as they stand, a network address for each pod, a read-only root that holds what the
image would (this machine's /usr, Python and repository), the manifest's user without capabilities,
process id 1. Not done: seccomp profiles, limits of memory, network policies, scheduling. The operator of
KubeRay is played by `ray_command`. Needs root, for namespaces.
"""

import base64
import ipaddress
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/k8s/gradloc"
NAMESPACE = "gradloc"
OPERATORS_TOKEN = "t" * 40  # what KubeRay makes where a cluster's authOptions ask for a token
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl",
    "passwd",
    "group",
    "nsswitch.conf",
    "alternatives",
    "profile",
)
DEVICES = ("null", "zero", "full", "random", "urandom")

# What happens before the container's process starts, in mount and process namespaces of its own.
START = """
set -e
mount -t tmpfs -o mode=0755 image {root}
cd {root}
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
mkdir -p opt proc sys dev etc tmp home run var
for name in {etc}; do test ! -e /etc/$name || cp -a /etc/$name etc/; done
cp {hosts} etc/hosts
: > etc/resolv.conf
mkdir -p opt/gradloc; mount --bind -o ro {prefix} opt/gradloc
mount -t proc proc proc
mount --rbind -o ro /sys sys
for name in {devices}; do : > dev/$name; mount --bind /dev/$name dev/$name; done
ln -s /proc/self/fd dev/fd; mkdir dev/shm
test -n '{shm}' || mount -t tmpfs -o mode=1777,size=64m shm dev/shm
{volumes}
for path in {image}; do mkdir -p .$path; mount --bind -o ro $path .$path; done  # last: a checkout may lie in /tmp
mount -o remount,ro,bind {root}
exec chroot {root} setpriv --reuid={user} --regid={group} --clear-groups --no-new-privs \
    --inh-caps=-all --bounding-set=-all --pdeathsig=KILL -- env -i {environment} {command}
"""


def helm() -> str:
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    assert found is not None, "helm is not there; make test puts it beside Python (.ci/helm)"
    return found


def render(*arguments: str) -> list[dict[str, Any]]:
    command = [helm(), "template", "release", str(CHART), "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def until(ask: Callable[[], Any], what: str, *, seconds: float = 120.0) -> Any:
    """The first true answer. Raises AssertionError with the last one."""
    deadline = time.monotonic() + seconds
    while True:
        seen = ask()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"never came true: {what}; last seen: {str(seen)[:500]}"
        time.sleep(0.1)


class Proxy:
    """Listens at an address and passes connections on, as kube-proxy does for a service."""

    def __init__(self, address: tuple[str, int], targets: list[Any]) -> None:
        self._targets = targets
        self._listener = socket.create_server(address)
        self._open = True
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._open = False
        self._listener.close()

    def _run(self) -> None:
        while self._open:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(taken,), daemon=True).start()

    def _pass(self, taken: socket.socket) -> None:
        target = random.choice(self._targets)
        other = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
        with taken, other:
            try:
                other.connect(target)
            except OSError:
                return
            peers = {taken: other, other: taken}
            while True:
                for ready in select.select(list(peers), [], [])[0]:
                    try:
                        data = ready.recv(65_536)
                        peers[ready].sendall(data)
                    except OSError:
                        return
                    if not data:
                        return


@dataclass
class Container:
    """One started container. `address` is its pod's."""

    name: str
    address: str
    spec: dict[str, Any]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    grace_s: float = 30.0
    ports: dict[str, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    restarts: int = 0
    ends: bool = False

    def launch(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.words, stdout=out, stderr=out, cwd="/")

    @property
    def pid(self) -> int:
        """The container's process 1, as this machine numbers it. Raises AssertionError when it has ended."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while self.process.poll() is None:
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.01)
        raise AssertionError(f"{self.name} has ended: {self.logs()[-2_000:]}")

    def logs(self) -> str:
        return self.log.read_text(errors="replace")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec`: in the container's namespaces, as its user, with its environment."""
        words = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--root", "--wd", "--"]
        words += [
            "setpriv",
            "--reuid=65532",
            "--regid=65532",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ]
        env = [f"{key}={value}" for key, value in self.environment.items()]
        return subprocess.run(
            [*words, "--", "env", "-i", *env, *command], capture_output=True, text=True, check=False, timeout=60
        )

    def probe(self, kind: str) -> bool:
        """Whether the probe of that kind passes; one that is not there passes."""
        probe = self.spec.get(kind)
        if probe is None:
            return True
        if "exec" in probe:
            return self.run(*probe["exec"]["command"]).returncode == 0
        asked = probe.get("httpGet") or probe["tcpSocket"]
        port = self.ports.get(asked["port"], asked["port"])
        try:
            if "tcpSocket" in probe:
                socket.create_connection((self.address, port), timeout=probe.get("timeoutSeconds", 1)).close()
                return True
            url = f"http://{self.address}:{port}{asked['path']}"
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                return bool(200 <= answer.status < 400)
        except (OSError, urllib.error.URLError):
            return False

    def wait_ready(self, *, seconds: float = 120.0) -> "Container":
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            until(lambda kind=kind: self.lives and self.probe(kind), f"{kind} of {self.name}", seconds=seconds)
        return self

    @property
    def lives(self) -> bool:
        """Whether it runs. One that ended by itself, as where Redis is not there yet, is started again, five times."""
        assert self.process is not None
        if self.process.poll() is None:
            return True
        if self.restarts and not self.ends:
            self.restarts -= 1
            self.launch()
        return False

    def end(self) -> int:
        """SIGTERM, then the grace period; returns the exit code. Raises AssertionError when it had to be killed."""
        assert self.process is not None
        self.ends = True
        os.kill(self.pid, signal.SIGTERM)
        try:
            return self.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {self.grace_s} s") from None

    def wait(self, *, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait()


class Cluster:
    """The documents of one rendered chart, and what runs of them."""

    def __init__(self, folder: Path, documents: list[dict[str, Any]], secrets: dict[str, dict[str, str]]) -> None:
        self.documents = documents
        self._folder = folder
        self._secrets = secrets | {
            one["metadata"]["name"]: {key: base64.b64decode(value).decode() for key, value in one["data"].items()}
            for one in self.of_kind("Secret")
        }
        self._mark = f"g{os.getpid() % 0xFFFFF:x}{random.randrange(256):02x}"
        self._net = ipaddress.ip_network(f"10.{random.randrange(64, 128)}.{random.randrange(256)}.0/24")
        self._free = iter(list(self._net.hosts())[1:])
        self._addresses: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._proxies: list[Proxy] = []
        self._namespaces: list[str] = []
        self.started: dict[str, Container] = {}
        self.host = str(next(self._net.hosts()))

    # --- the network ---

    def __enter__(self) -> "Cluster":
        _ip("link", "add", f"{self._mark}br", "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", f"{self._mark}br")
        _ip("link", "set", f"{self._mark}br", "up")
        for name, pod, replicas in self.pods():
            for number in range(replicas):
                self._addresses[f"{name}-{number}"] = str(next(self._free))
            if "/head" in name:
                self._name(f"{name.split('/')[1]}-head-svc", self._addresses[f"{name}-0"])
            del pod
        for service in self.of_kind("Service"):
            chosen = [(name, pod, replicas) for name, pod, replicas in self.pods() if _selects(service, pod)]
            addresses = [self._addresses[f"{name}-{number}"] for name, _, count in chosen for number in range(count)]
            named = {port["name"]: port["containerPort"] for _, pod, _ in chosen for port in _ports(pod)}
            if service["spec"].get("clusterIP") == "None":
                self._name(service["metadata"]["name"], addresses[0])
                continue
            own = self._service(service["metadata"]["name"])
            for port in service["spec"]["ports"]:
                target = named[port["targetPort"]]
                self._proxies.append(Proxy((own, port["port"]), [(address, target) for address in addresses]))
        return self

    def __exit__(self, *_: object) -> None:
        for container in self.started.values():
            container.kill()
        for proxy in self._proxies:
            proxy.close()
        for name in self._namespaces:
            _ip("netns", "del", name)
        _ip("link", "del", f"{self._mark}br")

    def until(self, ask: Callable[[], Any], what: str, *, seconds: float = 120.0) -> Any:
        """The first true answer; meanwhile containers that ended by themselves are started again."""
        return until(lambda: [one.lives for one in self.started.values()] and ask(), what, seconds=seconds)

    def secret(self, name: str) -> dict[str, str]:
        return self._secrets[name]

    def logs(self) -> str:
        return "".join(f"--- {name}\n{one.logs()[-3_000:]}\n" for name, one in self.started.items())

    def outside(self, name: str, port: int, target: Any) -> str:
        """A server that is not of the chart, under a name; `target` is (host, port) or a socket's path."""
        address = self._service(name)
        self._proxies.append(Proxy((address, port), [target]))
        return f"{name}:{port}"

    def address_of(self, name: str) -> str:
        return self._hosts[name]

    def _service(self, name: str) -> str:
        address = str(next(self._free))
        _ip("addr", "add", f"{address}/24", "dev", f"{self._mark}br")
        self._name(name, address)
        return address

    def _name(self, name: str, address: str) -> None:
        for suffix in ("", f".{NAMESPACE}", f".{NAMESPACE}.svc"):
            self._hosts[name + suffix] = address

    def _namespace(self, address: str) -> str:
        name = f"{self._mark}n{len(self._namespaces)}"
        self._namespaces.append(name)
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}v", "master", f"{self._mark}br", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "route", "add", "default", "via", self.host)  # Ray asks the routes for its own address
        return name

    # --- pods ---

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [document for document in self.documents if document["kind"] == kind]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Name, pod template and number of replicas."""
        for document in self.documents:
            name = f"{document['kind']}/{document['metadata']['name']}"
            spec = document.get("spec", {})
            match document["kind"]:
                case "Pod":
                    yield name, document, 1
                case "Deployment" | "StatefulSet" | "Job":
                    yield name, spec["template"], spec.get("replicas", 1)
                case "RayCluster" | "RayService":
                    spec = spec.get("rayClusterConfig", spec)
                    yield f"{name}/head", spec["headGroupSpec"]["template"], 1
                    for group in spec["workerGroupSpecs"]:
                        yield f"{name}/{group['groupName']}", group["template"], 1

    def start(self, part: str, number: int = 0) -> Container:
        """Start the pod whose name contains `part`: its one container."""
        ((name, pod),) = [(name, pod) for name, pod, _ in self.pods() if part in name]
        spec = pod["spec"]
        (container,) = spec["containers"]
        key = f"{name}-{number}"
        folder = self._folder / re.sub(r"\W+", "-", key)
        folder.mkdir(exist_ok=True)
        if name.startswith(("RayCluster", "RayService")):
            (document,) = self.of_kind(name.split("/")[0])
            container = container | {"command": ray_command(document, name.rsplit("/", 1)[1])}
            if document["spec"].get("rayClusterConfig", {}).get("authOptions") == {"mode": "token"}:
                given = [("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", OPERATORS_TOKEN)]
                container["env"] = [*container["env"], *({"name": key, "value": value} for key, value in given)]
        environment = self._environment(container)
        words = [_expanded(word, environment) for word in [*container["command"], *container.get("args", ())]]
        user = spec["securityContext"]
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in self._hosts.items()))
        root = folder / "root"
        root.mkdir(exist_ok=True)
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        script = START.format(
            root=root,
            image=" ".join(shlex.quote(path) for path in ("/usr", sys.base_prefix, str(ROOT))),
            prefix=sys.prefix,
            etc=" ".join(ETC),
            devices=" ".join(DEVICES),
            hosts=hosts,
            shm="yes" if "/dev/shm" in mounts else "",
            volumes="\n".join(self._volumes(spec, container, folder)),
            user=user["runAsUser"],
            group=user["runAsGroup"],
            environment=" ".join(shlex.quote(f"{key}={value}") for key, value in environment.items()),
            command=" ".join(shlex.quote(word) for word in words),
        )
        namespace = self._namespace(self._addresses[key])
        log = folder / "log"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--propagation=private"]
        started = Container(
            name=key,
            address=self._addresses[key],
            spec=container,
            environment=environment,
            log=log,
            grace_s=spec.get("terminationGracePeriodSeconds", 30),
            ports={port["name"]: port["containerPort"] for port in container.get("ports", ())},
        )
        # Whoever starts it may be killed: nothing of it must stay.
        started.words = ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", namespace, *unshare, "sh", "-c", script]
        started.restarts = 5 * (not name.startswith(("Job", "Pod")))
        started.launch()
        self.started[key] = started
        return started

    def start_beside(self, name: str, command: list[str], environment: dict[str, str], **secrets: str) -> Container:
        """Start a pod of somebody else's, such as a trainer, from the localizer's image; `secrets` are mounted."""
        volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
        mounts = [{"name": "tmp", "mountPath": "/tmp"}]
        for secret, place in secrets.items():
            volumes.append({"name": secret, "secret": {"secretName": secret.replace("_", "-")}})
            mounts.append({"name": secret, "mountPath": place})
        env = [{"name": key, "value": value} for key, value in environment.items()]
        container = {"name": name, "image": "gradloc/localizer:0", "command": command, "env": env}
        security = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
        spec = {"securityContext": security, "containers": [container | {"volumeMounts": mounts}], "volumes": volumes}
        self.documents.append({"kind": "Pod", "metadata": {"name": name, "labels": {}}, "spec": spec})
        self._addresses[f"Pod/{name}-0"] = str(next(self._free))
        return self.start(f"Pod/{name}")

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        image = container["image"].rpartition(":")[0].rpartition("/")[2]
        found = image_environment(image) | {"HOSTNAME": "pod"}
        for source in container.get("envFrom", ()):
            found |= self._secrets[source["secretRef"]["name"]]
        for entry in container.get("env", ()):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                found[entry["name"]] = self._secrets[reference["name"]][reference["key"]]
            else:
                found[entry["name"]] = _expanded(entry["value"], found)
        return found

    def _volumes(self, spec: dict[str, Any], container: dict[str, Any], folder: Path) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        group = spec["securityContext"]["fsGroup"]
        for mount in container.get("volumeMounts", ()):
            volume = volumes.get(mount["name"], {})
            place = folder / f"volume-{mount['name']}"
            place.mkdir(exist_ok=True)
            if "secret" in volume:
                given = self._secrets[volume["secret"]["secretName"]]
                keys = {item["key"]: item["path"] for item in volume["secret"].get("items", ())}
                for key, value in given.items():
                    if not keys or key in keys:
                        file = place / keys.get(key, key)
                        file.write_text(value)
                        os.chown(file, 0, group)
                        file.chmod(0o640)
            os.chown(place, 0, group)
            place.chmod(0o2777 if "emptyDir" in volume else 0o2775)
            target = f".{mount['mountPath']}"
            yield f"mkdir -p {shlex.quote(target)}"
            options = "ro" if mount.get("readOnly") or "secret" in volume else "rw"
            yield f"mount --bind -o {options} {shlex.quote(str(place))} {shlex.quote(target)}"


def composed(file: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    """What a compose file says, as pods that reach each other by the services' names."""

    def filled(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        assert name in variables or kind == ":-", f"{name} is not set: {rest}"
        return variables.get(name, rest or "")

    text = re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", filled, file.read_text())
    documents = []
    for name, service in yaml.safe_load(text)["services"].items():
        mounts, volumes = [], []
        places = [*service.get("volumes", ()), *(f"tmp:{one.split(':')[0]}" for one in service.get("tmpfs", ()))]
        for number, (source, place, *options) in enumerate(one.split(":") for one in places):
            kind = {"emptyDir": {}} if source == "tmp" else {"persistentVolumeClaim": {"claimName": source}}
            volumes.append({"name": f"v{number}", **kind})
            mounts.append({"name": f"v{number}", "mountPath": place, "readOnly": "ro" in options})
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        user, group = map(int, service["user"].split(":"))
        container = {key: service[key] for key in ("image", "command")} | {"name": name, "volumeMounts": mounts}
        container["env"] = [
            {"name": key, "value": value or ""} for key, value in service.get("environment", {}).items()
        ]
        security = {"runAsUser": user, "runAsGroup": group, "fsGroup": group}
        spec = {"securityContext": security, "containers": [container], "volumes": volumes}
        spec["terminationGracePeriodSeconds"] = int(service.get("stop_grace_period", "10s").removesuffix("s"))
        labels = {"service": name}
        documents.append({"kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec})
        headless = {"clusterIP": "None", "selector": labels}
        documents.append({"kind": "Service", "metadata": {"name": name}, "spec": headless})
    return documents


def image_environment(image: str) -> dict[str, str]:
    """What the Dockerfile of ours sets; for another image only a path."""
    found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    file = ROOT / "services" / image / "Dockerfile"
    if file.exists():
        for line in re.findall(r"^ENV (.*)$", file.read_text(), re.MULTILINE):
            for word in shlex.split(line):
                key, _, value = word.partition("=")
                found[key] = value.replace("$PATH", found["PATH"])
    return found


def ray_command(cluster: dict[str, Any], group: str) -> list[str]:
    """What KubeRay's operator makes of a group: `ray start` with the group's parameters and limits."""
    spec = cluster["spec"].get("rayClusterConfig", cluster["spec"])
    head = spec["headGroupSpec"]
    found = head if group == "head" else next(one for one in spec["workerGroupSpecs"] if one["groupName"] == group)
    limits = found["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    parameters = {"block": "true", "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    parameters |= found["rayStartParams"]
    if group != "head":
        parameters["address"] = f"{cluster['metadata']['name']}-head-svc:6379"
    parameters.setdefault("memory", str(_bytes(limits["memory"])))
    for name, number in limits.items():
        if name.endswith("gpu") and number:
            parameters.setdefault("num-gpus", str(number))
    words = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in sorted(parameters.items())]
    start = "ray start --head" if group == "head" else "ray start"
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {start} {' '.join(words)}"]


def _bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


def _expanded(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _selects(service: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(service["spec"]["selector"].items() <= pod["metadata"]["labels"].items())


def _ports(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes the cluster of a file of ci/, `cluster("small-values.yaml", secrets)`, or of the compose file."""
    lacks = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0 or lacks:
        pytest.skip(f"pods need root and ip, unshare, nsenter, setpriv; missing: {lacks or 'root'}")
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "ip", "link", "add", "try0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:  # root of a container that may not
        pytest.skip(f"pods need namespaces and a bridge: {tried.stderr.strip()}")
    made: list[Cluster] = []

    def make(case: str, secrets: dict[str, dict[str, str]] | None = None, **variables: str) -> Cluster:
        if case == "compose.yaml":
            documents = composed(ROOT / "deploy" / case, variables)
        else:
            documents = render("--values", str(CHART / "ci" / case))
        made.append(Cluster(tmp_path, documents, secrets or {}).__enter__())
        return made[-1]

    yield make
    for one in made:
        sys.stdout.write(one.logs())  # shown where the test failed
        one.__exit__()
