"""The world with Ray, a store that can be in trouble, and tiny trainers whose spikes are localized for real."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

from child import MARK
from world import HERE, World

from gradloc.workstation.processes import free_port
from gradloc.workstation.ray import RayHead

FACTORY = "tiny_policy:policy"
SNAPSHOT_TIMEOUT_S = 20.0
RAY_CPUS = 4


class LocalizingWorld(World):
    num_runs = 2
    rate = 4.0
    far = ("trainer",)  # Ray listens on the loopback address only

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.store = folder / "store"
        self._trouble = folder / "store.json"
        self._plugin = folder / "plugin"
        self._ray_port = free_port()
        self._ray_token: str | None = None
        self.ray: RayHead | None = None
        self._lay_plugin()

    def start(self) -> None:
        self.start_ray()
        assert self.ray is not None
        self.ray.wait_ready()
        super().start()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            if self.ray is not None:
                self.ray.end()
        super().__exit__()

    # --- Ray ---

    def start_ray(self) -> None:
        """A head at the same address as the last one, with nothing of what that one knew."""
        env = {
            **self._store_env(), "GRADLOC_REDIS_URL": self.url(), "GRADLOC_ALLOWED_FACTORIES": FACTORY,
            "GRADLOC_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.ray = RayHead(
            self.folder / "ray.log", num_cpus=RAY_CPUS, job_env=env, port=self._ray_port, token=self._ray_token
        )
        self._ray_token = self.ray.token

    def kill_ray(self) -> None:
        """The machine of the head is gone, with all that ran on it."""
        if self.ray is not None:
            self.ray.process.kill()
            self.ray.end()

    def is_well(self) -> bool:
        return self.ray is not None and self.ray.answers()

    def jobs(self, word: str = "gradloc_localizer") -> list[int]:
        """Processes of jobs on our Ray whose command line has the word."""
        needle, found = f"CHAOS_STORE={self._trouble}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                is_job = word.encode() in command and not command.startswith(b"/bin/sh")
                if is_job and needle in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return found

    # --- the store ---

    def trouble(self, **what: object) -> None:
        """Put the store into trouble; without arguments it is well again."""
        part = self._trouble.with_suffix(".part")
        part.write_text(json.dumps(what))
        part.replace(self._trouble)

    def _lay_plugin(self) -> None:
        # fsspec finds other file systems by entry points of installed distributions: a folder on the path is enough.
        facts = self._plugin / "chaos_store-1.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos-store\nVersion: 1\n")
        (facts / "entry_points.txt").write_text("[fsspec.specs]\nchaos = chaos_store:ChaosStore\n")
        for name in ("chaos_store.py", "tiny_policy.py"):
            shutil.copy(HERE / name, self._plugin / name)
        self.trouble()

    def _store_env(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self._plugin), os.environ.get("PYTHONPATH", "")]))
        return {"PYTHONPATH": path, "CHAOS_STORE": str(self._trouble), MARK: str(self.folder)}

    # --- who lives here ---

    def detector_options(self) -> list[str]:
        return [
            "--ray-address", f"http://127.0.0.1:{self._ray_port}", "--localizer-python", sys.executable,
            "--snapshot-timeout", str(SNAPSHOT_TIMEOUT_S),
        ]  # fmt: skip

    def detector_env(self) -> dict[str, str]:
        return {"RAY_AUTH_TOKEN": self._ray_token or ""}

    def trainer_command(self, run: str, first_step: int) -> list[str]:
        return [
            sys.executable, str(HERE / "torch_trainer.py"), self.url(self._place(run)), f"chaos://{self.store}", run,
            str(self.attempts[run]), str(first_step), str(self.rate), str(self.seed), str(self.truth_path(run)),
        ]  # fmt: skip

    def trainer_env(self) -> dict[str, str]:
        return self._store_env() | {"OMP_NUM_THREADS": "1"}
