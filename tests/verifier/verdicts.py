"""Constructed verdicts, and the schemas that reports are valid against."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import xmlschema

from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import json_report
from verified_fsdp2.verifier.verdict import Verdict, verdict_of

SCHEMAS = Path(__file__).parents[1] / "schemas"
REPORT = json.loads(
    (Path(json_report.__file__).parent / "report.schema.json").read_text(encoding="utf-8")
)
ENVIRONMENT = {"torch": "2.13.0", "python": "3.11", "platform": "Linux"}


def verdict(*findings: Finding, root: Path | str = "/a/repo", **target: Any) -> Verdict:
    """A verdict without runs on the script train.py in this folder."""
    words = dict.fromkeys(("args", "save_args", "resume_args", "single_args"), "")
    whole = {
        **words,
        "nproc": 2,
        "steps": 5,
        "reshard_to": [],
        "cwd": str(root),
        "script": f"{root}/train.py",
    }
    whole |= {"command": "fsdp2 verify train.py", **target}
    return Verdict(verdict_of(findings), whole, ENVIRONMENT, (), findings, seconds=1.0)


def valid(name: str, text: str) -> str:
    """A report, which the schema of its format, if there is one, takes."""
    if name == "json":
        jsonschema.validate(json.loads(text), REPORT)
    elif name == "sarif":
        sarif().validate(json.loads(text))
    elif name == "junit":
        junit().validate(text)
    return text


@cache
def junit() -> Any:
    return xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))


@cache
def sarif() -> Any:
    return jsonschema.Draft7Validator(
        json.loads((SCHEMAS / "sarif-2.1.0.json").read_text(encoding="utf-8"))
    )
