"""Ray's own cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from engine_tools import Missing, Started, environment


def ray_python(given: str | None) -> Path:
    python = Path(given or sys.executable)
    done = subprocess.run(
        [python, "-c", "import ray.train.torch"], capture_output=True, timeout=120, check=False
    )
    if done.returncode:
        raise Missing(f"no Ray in {python}: pip install 'ray[train]', then --ray PYTHON")
    return python


def ray_version(python: Path) -> str:
    done = subprocess.run(
        [python, "-c", "import ray; print(ray.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return f"ray {done.stdout.strip()}"


class RayCluster:
    """A head, and nodes that can be lost."""

    def __init__(self, python: Path, folder: Path, port: int) -> None:
        self.ray, self.folder, self.port = python.with_name("ray"), folder, port
        self.variables = {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }
        self.nodes: list[Started] = []

    def start(self, *options: str) -> Started:
        log = self.folder / f"node-{len(self.nodes)}.log"
        common = ["--block", "--disable-usage-stats", "--object-store-memory", "100000000"]
        node = Started(
            [str(self.ray), "start", *common, *options], log, self.folder, **self.variables
        )
        self.nodes.append(node)
        return node

    def head(self, cpus: int) -> Started:
        temporary = ["--temp-dir", str(self.folder / "ray"), "--include-dashboard", "false"]
        return self.start("--head", "--port", str(self.port), "--num-cpus", str(cpus), *temporary)

    def node(self, cpus: int) -> Started:
        return self.start("--address", f"127.0.0.1:{self.port}", "--num-cpus", str(cpus))

    def status(self) -> str:
        command = [str(self.ray), "status", "--address", f"127.0.0.1:{self.port}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment(**self.variables),
        )
        return done.stdout


@contextlib.contextmanager
def ray_cluster(python: Path, folder: Path, port: int) -> Iterator[RayCluster]:
    folder.mkdir()
    cluster = RayCluster(python, folder, port)
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
        shutil.rmtree(folder / "ray", ignore_errors=True)
