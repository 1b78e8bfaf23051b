"""The report of `fsdp2 lint --migrate`, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..source.migration import STEPS, Item, Migration
from .sanitize import in_json, sanitize
from .text import LIMIT

SCHEMA = 1
PLACES = 4  # of one construct, in the text; the JSON has all
_KINDS = {
    "fsdp1": "FSDP1",
    "ddp": "DDP",
    "dataparallel": "DataParallel",
    "accelerate": "accelerate",
    "transformers": "the Trainer of transformers",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "single": "one process",
    "fsdp2": "FSDP2",
}


def render(migration: Migration) -> str:
    """What is to be done, step by step, as text of at most about 10,000 characters."""
    kinds, names = ", ".join(_KINDS[kind] for kind in migration.kinds), " ".join(migration.paths)
    if not migration.items:
        why = f"it is {kinds}" if kinds else "no training loop is seen"
        return f"{names}: nothing to migrate ({why}); `fsdp2 lint` looks for faults\n"
    number = len(migration.items)
    pages = list(dict.fromkeys(item.reference for item in migration.items))
    head = f"{names} ({kinds}): {number} construct{'' if number == 1 else 's'} to change, in the order of work; read {', '.join(pages)}"
    steps = [(step, [item for item in migration.items if item.step == step]) for step in STEPS]
    lines = [head]
    for position, (step, items) in enumerate([pair for pair in steps if pair[1]], start=1):
        lines += ["", f"{position}. {step}"]
        lines += [line for item in items for line in _lines(item)]
    text = "\n".join(lines)
    if len(text) > LIMIT:
        text = text[:LIMIT].rpartition("\n")[0] + "\n... (cut; --report json=PATH has all)"
    return sanitize(
        f"{text}\n\nnothing was edited or run; after your edits, in a copy: fsdp2 lint COPY, fsdp2 verify COPY --reference {names}\n"
    )


def _lines(item: Item) -> list[str]:
    """The construct with its places and rules, its counterpart, what to mind."""
    places = [f"{Path(place['file']).name}:{place['line']}" for place in item.places]
    more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
    rules = f"   ({', '.join(item.rules)})" if item.rules else ""
    mind = [f"       {item.mind}"] if item.mind else []
    head = f"   {item.action} {item.construct}   {', '.join(places[:PLACES])}{more}{rules}"
    return [head, f"       -> {item.fsdp2}", *mind]


def as_json(migration: Migration) -> str:
    """All of it. Items stand in the order of work; `places` are the lines that an item concerns."""
    import json

    items: list[dict[str, Any]] = [
        {
            "step": item.step,
            "construct": item.construct,
            "action": item.action,
            "fsdp2": item.fsdp2,
            "mind": item.mind,
            "rules": list(item.rules),
            "reference": item.reference,
            "places": item.places,
        }
        for item in migration.items
    ]
    told = {
        "schema": SCHEMA,
        "paths": migration.paths,
        "files": migration.files,
        "kinds": migration.kinds,
        "items": items,
    }
    return in_json(json.dumps(told, indent=2)) + "\n"


RENDERERS = {"text": render, "json": as_json}
