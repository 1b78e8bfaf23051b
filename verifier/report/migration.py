"""The report of `fsdp2 lint --migrate`, as text and as JSON."""

from pathlib import Path

from ..analysis.wording import count
from ..source.migration import STEPS, Item, Migration
from .sanitize import in_json, sanitize
from .text import bounded
from .wrapping import wrapped

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
    """What to change, step by step, as text of at most about 10,000 characters."""
    kinds, names = ", ".join(_KINDS[kind] for kind in migration.kinds), " ".join(migration.paths)
    if not migration.items:
        why = f"it is {kinds}" if kinds else "no training loop was found"
        return f"{names}: nothing to migrate ({why}); `fsdp2 lint` checks it\n"
    docs = ", ".join(dict.fromkeys(item.reference for item in migration.items))
    constructs = count(len(migration.items), "construct")
    lines = wrapped(f"{names} ({kinds}): {constructs} to change, in the order of work; read {docs}")
    steps = [(step, [item for item in migration.items if item.step == step]) for step in STEPS]
    for position, (step, items) in enumerate([pair for pair in steps if pair[1]], start=1):
        lines += ["", f"{position}. {step}", *(line for item in items for line in _lines(item))]
    after = (
        "nothing was edited or run; after your edits, in a copy: fsdp2 lint COPY, fsdp2 verify"
        f" COPY --reference {names}"
    )
    return sanitize("\n".join([*bounded(lines), "", *wrapped(after)]) + "\n")


def _lines(item: Item) -> list[str]:
    """The construct with its places and rules, its counterpart, and a warning."""
    places = [f"{Path(place['file']).name}:{place['line']}" for place in item.places]
    more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
    rules = f"   ({', '.join(item.rules)})" if item.rules else ""
    head = f"{item.action} {item.construct}   {', '.join(places[:PLACES])}{more}{rules}"
    warning = wrapped(item.mind, " " * 7) if item.mind else []
    return [*wrapped(head, "   ", "     "), *wrapped(item.fsdp2, "       -> "), *warning]


def as_json(migration: Migration) -> str:
    """All items, in the order of work; `places` are the lines that an item concerns."""
    import json

    keys = ("step", "construct", "action", "fsdp2", "mind", "rules", "reference", "places")
    items = [{key: getattr(item, key) for key in keys} for item in migration.items]
    parts = {key: getattr(migration, key) for key in ("paths", "files", "kinds")}
    return in_json(json.dumps({"schema": SCHEMA, **parts, "items": items}, indent=2)) + "\n"


RENDERERS = {"text": render, "json": as_json}
