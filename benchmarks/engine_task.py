"""Read a task with SkyPilot's own parser: prints {"version", "read", "unnoticed"} as JSON.

(pip install skypilot)

    python engine_task.py launch/sky.yaml

No cloud is asked for anything.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sky
import yaml

MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a misspelt key": lambda task: task.update(num_node=2),
    "a misspelt resource": lambda task: task["resources"].update(accelerator="H100"),
    "text for a number": lambda task: task.update(num_nodes="two"),
}


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    task = sky.Task.from_yaml_config(copy.deepcopy(config))
    unnoticed = []
    for name, mistake in MISTAKES.items():
        changed = copy.deepcopy(config)
        mistake(changed)
        try:
            sky.Task.from_yaml_config(changed)
        except Exception:  # of several kinds
            continue
        unnoticed.append(name)
    read = {"name": task.name, "num_nodes": task.num_nodes, "run": task.run == config["run"]}
    version = importlib.metadata.version("skypilot")
    print(
        json.dumps(
            {"version": version, "read": read, "mistakes": len(MISTAKES), "unnoticed": unnoticed}
        )
    )


if __name__ == "__main__":
    main()
