"""What the templates see of the launch: the files of the engines, and the times that follow from
others.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from ..spec import Spec

FILES = {
    "torchrun": "launch/torchrun.sh",
    "slurm": "launch/slurm.sbatch",
    "kubernetes": "launch/kubernetes.yaml",
    "ray": "launch/ray_train.py",
    "skypilot": "launch/sky.yaml",
}
STARTS = {  # where the command is given, and what it is
    "torchrun": ("on each node, HEAD is one of them", "bash launch/torchrun.sh"),
    "slurm": ("with Slurm", "sbatch launch/slurm.sbatch"),
    "kubernetes": ("with Kubernetes", "kubectl create -f launch/kubernetes.yaml"),
    "ray": ("with Ray", "python launch/ray_train.py"),
    "skypilot": ("with SkyPilot", "sky jobs launch launch/sky.yaml"),
}
ALONE = ("on one node", "bash launch/torchrun.sh")
# those of torchrun, and the one by which Slurm announces the end
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
MARGIN = 30  # seconds to stop and to report, beside the step and the save


def launch_files(launch: Mapping[str, Any]) -> dict[str, str]:
    """The files of the engines, path to template."""
    return {
        path: f"{path.replace('/', '_')}.j2"
        for engine, path in FILES.items()
        if engine in launch["engines"]
    }


def launch_context(spec: Spec) -> dict[str, Any]:
    """The part of the template context that follows from the section `launch`."""
    launch, folder = spec["launch"], spec["checkpoint"]["directory"]
    grace = math.ceil(spec["checkpoint"]["grace_seconds"])
    return {
        "engines": launch["engines"],
        "starts": [
            ALONE if one == "torchrun" and launch["nodes"] == 1 else STARTS[one]
            for one in launch["engines"]
        ],
        "several_nodes": launch["nodes"] > 1,
        "nodes_restart": launch["nodes"] > 1 and bool({"torchrun", "slurm"} & {*launch["engines"]}),
        "gpu": launch["device"] == "cuda",
        "on_gpus": launch["device"] == "cuda" and bool(launch["engines"]),
        "node_cpus": launch["devices_per_node"] * launch["cpus_per_device"],
        "ray_resources": {
            "CPU": launch["cpus_per_device"],
            **({"GPU": 1} if launch["device"] == "cuda" else {}),
        },
        "guard": f"every=100 on-breach=warn out={shlex.quote(folder)}",
        "signals": SIGNALS,
        "grace": grace,
        "stop_seconds": grace + MARGIN,
        "warn_seconds": max(120, grace + 2 * MARGIN),
    }
