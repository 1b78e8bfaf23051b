"""Hold a TrainJob against the OpenAPI types of Kubeflow Trainer, made strict: prints {"version",
"wrong", "unnoticed"} as JSON.

    python engine_trainjob.py launch/kubernetes.yaml

It needs `pip install kubeflow_trainer_api jsonschema pyyaml`.

The package kubeflow_trainer_api is generated from the OpenAPI document of
github.com/kubeflow/trainer (Apache-2.0), as the CRD is. What the CRD says beyond types (lengths,
the form of the name) is from pkg/apis/trainer/v1alpha1/trainjob_types.go at commit 0015772c.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubeflow_trainer_api import models

QUANTITY = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|[numk])?$"
MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a misspelt key": lambda job: job["spec"]["trainer"].update(numNode=2),
    "a key of another level": lambda job: job["spec"].update(image="x"),
    "text for a number": lambda job: job["spec"]["trainer"].update(numNodes="2"),
    "no runtime": lambda job: job["spec"].pop("runtimeRef"),
    "a volume without a name": lambda job: pod(job)["volumes"][0].pop("name"),
    "podTemplateOverrides, which 2.2 has removed": (
        lambda job: job["spec"].update(podTemplateOverrides=[])
    ),
    "a name that is no label": lambda job: job["metadata"].update(name="Launched_1"),
}


def pod(job: dict[str, Any]) -> Any:
    jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ]
    return jobs[0]["template"]["spec"]["template"]["spec"]


def strict(part: Any) -> None:
    """No key that the types do not name."""
    for below in (
        part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    ):
        strict(below)
    if isinstance(part, dict) and "properties" in part:
        part["additionalProperties"] = False


def schema() -> dict[str, Any]:
    found: dict[str, Any] = models.TrainerV1alpha1TrainJob.model_json_schema(by_alias=True)
    strict(found)
    (quantity,) = (name for name in found["$defs"] if name.endswith("ApiResourceQuantity"))
    found["$defs"][quantity] = {
        "anyOf": [{"type": "integer"}, {"type": "string", "pattern": QUANTITY}]
    }
    return found


def wrong(job: dict[str, Any]) -> list[str]:
    """Where the job is not what the types say, at the innermost places."""
    found = [
        place
        for error in jsonschema.Draft202012Validator(schema()).iter_errors(job)
        for place in innermost(error)
    ]
    if (
        not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
        or len(job["metadata"]["name"]) > 63
    ):
        found.append("metadata.name is no label of RFC 1035")
    return found


def innermost(error: Any) -> list[str]:
    below = [one for one in error.context or () if "null" not in str(one.validator_value)]
    if below:
        return [place for one in below for place in innermost(one)]
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"]


def main() -> None:
    job = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    unnoticed = []
    for name, mistake in MISTAKES.items():
        changed = copy.deepcopy(job)
        mistake(changed)
        if not wrong(changed):
            unnoticed.append(name)
    version = importlib.metadata.version("kubeflow_trainer_api")
    reported = {
        "version": version,
        "wrong": wrong(job),
        "mistakes": len(MISTAKES),
        "unnoticed": unnoticed,
    }
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
