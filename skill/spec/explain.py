"""The schema as a person reads it: one page a key, or a table of keys."""

from __future__ import annotations

import json
from typing import Any

from ...verifier.config.reading.words import similar
from ...verifier.errors import UserError
from ...verifier.report.wrapping import table as columns
from ...verifier.report.wrapping import wrapped
from . import renamed
from . import schema as spec_schema
from .schema import Schema, kinds_of, required, shown

LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {
    "integer": "int",
    "number": "number",
    "boolean": "bool",
    "array": "list",
    "object": "mapping",
}


def find(key: str) -> dict[str, Any]:
    """All there is to know about one key, also by its old name.

    Raises UserError with the key that was probably meant.
    """
    key = renamed.KEYS.get(key, key)
    known = {name: (schema, section) for name, schema, section in spec_schema.walk()}
    if key not in known:
        raise UserError(f"unknown key {key!r}{_did_you_mean(key, list(known))}")
    return _entry(key, *known[key])


def entries(section: str | None = None) -> list[dict[str, Any]]:
    """All keys, or those of one section."""
    return [
        _entry(*found)
        for found in spec_schema.walk()
        if section is None or found[0].startswith(f"{section}.")
    ]


def page(entry: dict[str, Any]) -> str:
    """One key, in full."""
    lines = [f"{entry['key']}{_kinds(entry)}", "", *wrapped(entry["description"], "  "), ""]
    facts = [("type", entry["type"]), ("default", _default(entry))]
    facts += [
        ("" if n else "examples", _inline(entry["key"], example))
        for n, example in enumerate(entry["examples"])
    ]
    lines += columns(facts, "  ")
    below = entries(entry["key"])
    if below:
        lines += ["", table(below)]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Key, default, type and the first sentence of the description."""
    cells = [
        (r["key"], _default(r), r["type"], _first_sentence(r["description"]) + _kinds(r))
        for r in rows
    ]
    return "\n".join(columns([("key", "default", "type", "description"), *cells]))


def _entry(key: str, schema: Schema, section: Schema) -> dict[str, Any]:
    name = key.rpartition(".")[2]
    entry: dict[str, Any] = {
        "key": key,
        "description": schema["description"],
        "type": _type(schema),
        "required": required(section, name),
        "kinds": kinds_of(section, name),
        "examples": schema["examples"],
    }
    if "default" in schema:
        entry["default"] = schema["default"]
    return entry


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " | ".join(str(choice) for choice in schema["enum"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    words = [str(choice) for choice in schema.get("then", {}).get("enum", [])]
    limits = " and ".join(
        f"{sign} {schema[limit]}"
        for limit, sign in LIMITS.items()
        if abs(schema.get(limit, 1e9)) < 1000
    )
    for name in types:
        if name == "string" and "then" not in schema:
            words.append("text")
        elif name in ("integer", "number"):
            words.append(f"{TYPES[name]} {limits}".strip())
        elif name == "array":
            words.append(f"list of {_type(schema['items'])}")
        elif name != "string":
            words.append(TYPES.get(name) or name)
    return " | ".join(words)


def _default(entry: dict[str, Any]) -> str:
    if "default" in entry:
        return "-" if entry["default"] == {} else _inline("", entry["default"])
    return "(required)"


def _inline(key: str, value: Any) -> str:
    text = value if isinstance(value, str) and "{" not in value else json.dumps(value)
    return f"{key.rpartition('.')[2]}: {text}" if key else text


def _kinds(entry: dict[str, Any]) -> str:
    return f" (kind {' or '.join(entry['kinds'])})" if entry["kinds"] else ""


def _first_sentence(description: str) -> str:
    return description.split(". ")[0].split("; ")[0].rstrip(".")


def _did_you_mean(key: str, known: list[str]) -> str:
    if foreign := spec_schema.FORM.foreign(*key.rpartition(".")[::2]):
        home, what = next(iter(foreign))
        return (f"; did you mean {shown(home)}?" if home else "") + (f" ({what})" if what else "")
    homes = [name for name in known if name.rpartition(".")[2] == key]
    match = homes[0] if len(homes) == 1 else similar(key, known)
    if not match:
        short = similar(key, [name.rpartition(".")[2] for name in known])
        match = next((name for name in known if name.rpartition(".")[2] == short), None)
    return f"; did you mean {shown(match)}?" if match else "; `fsdp2 spec explain` lists all keys"
