"""The messages of faults: what was expected, what was found, what to write instead."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from . import scalars
from .problems import KeyPath, dotted, quoted
from .schema import Form, Schema, branches, expectation, kinds_of, shown

YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
LIMITS = {
    "minimum": "must be at least",
    "maximum": "must be at most",
    "exclusiveMinimum": "must be more than",
    "exclusiveMaximum": "must be less than",
}


def unknown_key(
    form: Form, path: KeyPath, key: str, section: Schema, known: list[str], written: dict[str, Any]
) -> tuple[str, KeyPath | None]:
    """The message for a key that the section does not have, and the key that was probably meant."""
    where = f" in {dotted(path)}" if path else ""
    message = f"unknown key {quoted(key)}{where}"
    kinds = kinds_of(section, key) if key in section["properties"] else []
    if kinds:
        return (
            (
                f"{message} of kind {known_kind(section, known)!r}; it belongs to kind"
                f" {', '.join(kinds)}"
            ),
            None,
        )
    match = similar(key, [name for name in known if name not in written]) or similar(key, known)
    part = match is not None and key in match  # `checkpointing` of activation_checkpointing
    if not part and (foreign := _foreign(form, path, key)):
        meant, hint = foreign
        return message + hint, meant
    if match:
        return f"{message}; did you mean {match!r}?", (*path, match)
    homes = [
        found.rpartition(".")[0] for found, _, _ in form.walk() if found.rpartition(".")[2] == key
    ]
    if len(homes) == 1 and homes[0]:
        return f"{message}; it belongs in {homes[0]}", (*homes[0].split("."), key)
    return f"{message}; known keys: {', '.join(known)}", None


def _foreign(form: Form, path: KeyPath, key: str) -> tuple[KeyPath | None, str] | None:
    """The key that another program's name for it stands for, and the hint at it."""
    home, what = next(iter(form.foreign(dotted(path), key)), (None, ""))
    if home is None:
        return None
    if not home:
        return None, f"; {what}"
    meant = tuple(home.split("."))
    shown = meant[-1] if meant[:-1] == path else home
    return meant, f"; did you mean {shown!r}?" + (f" ({what})" if what else "")


def known_kind(section: Schema, known: list[str]) -> str:
    """The kind whose keys are `known`."""
    return next(
        (kind for kind, part in branches(section).items() if list(part["properties"]) == known), ""
    )


def similar(word: str, choices: list[str], cutoff: float = 0.6) -> str | None:
    """The choice that `word` probably stands for."""
    from difflib import get_close_matches

    plain = {choice.lower().replace("_", ""): choice for choice in choices}
    tidy = word[:100].lower().replace("-", "").replace("_", "").replace(" ", "")
    initials = {
        "".join(part[0] for part in choice.split("_") if part): choice
        for choice in choices
        if "_" in choice
    }
    own = "".join(part[0] for part in word.lower().replace("-", "_").split("_") if part)
    if tidy in initials or (len(own) > 1 and own in plain):
        return initials.get(tidy) or plain[own]
    swapped = [choice for choice in plain if sorted(choice) == sorted(tidy)]
    found = swapped or get_close_matches(tidy, list(plain), n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def wanted(key: str, schema: Schema | None) -> str:
    """What to write for a missing key."""
    if schema is None:
        return ""
    if "properties" in schema:
        return "; it is a mapping"
    choices = schema.get("enum") or schema["examples"][:1]
    if len(choices) > 3:
        return f"; write '{key}: ' and one of {', '.join(choices)}"
    lines = [
        f"'{key}: {choice if isinstance(choice, str) else json.dumps(choice)}'"
        for choice in choices
    ]
    return f"; {'write' if 'enum' in schema else 'for example'} {' or '.join(lines)}"


def value(error: Any, schema: Schema) -> str:
    """What is wrong with a value, as it reads after its key."""
    limit, found = error.validator_value, error.instance
    kind = error.validator
    other = schema.get("otherNames", {}).get(str(found).lower())
    if kind in ("type", "enum") and other:
        return f"must be {expectation(schema)}, found {describe(found)}; {other}"
    if kind == "type":
        infinite = (
            isinstance(found, float) and not math.isfinite(found) and "number" in schema["type"]
        )
        expected = "a finite number" if infinite else expectation(schema)
        return f"must be {expected}, found {describe(found)}{_instead(schema, found)}"
    if kind == "enum":
        match = similar(found, limit, 0.5) if isinstance(found, str) and len(limit) > 1 else None
        meant = f"; did you mean {match!r}?" if match else _instead(schema, found)
        return f"must be {expectation(schema)}, found {describe(found)}{meant}"
    if kind == "pattern":
        return f"must be {pattern(error.schema)}, found {describe(found)}"
    if kind in LIMITS:
        return f"{LIMITS[kind]} {shown(limit)}, found {describe(found)}"
    if kind in ("minItems", "maxItems"):
        exact = schema.get("minItems") == schema.get("maxItems")
        least = "exactly" if exact else "at least" if kind == "minItems" else "at most"
        return f"must have {least} {limit} item{'s' if limit != 1 else ''}, found {len(found)}"
    if kind in ("minLength", "maxLength"):
        return (
            "must not be empty" if kind == "minLength" else f"must have at most {limit} characters"
        )
    if kind == "uniqueItems":
        twice = next((item for number, item in enumerate(found) if item in found[:number]), None)
        return f"must not hold {describe(twice)} twice"
    return f"must be {expectation(schema)}, found {describe(found)}"


def pattern(schema: Schema) -> str:
    return str(schema.get("patternErrorMessage", "written in another way"))


def describe(found: object) -> str:
    """A value as it reads after `found`."""
    if found is None:
        return "nothing (null)"
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, float) and not math.isfinite(found):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(found)]
    if isinstance(found, str):
        return f"the text {quoted(found)}"
    if isinstance(found, list | dict):
        noun = "list" if isinstance(found, list) else "mapping"
        return f"a {noun}" if found else f"an empty {noun}"
    return quoted(found)


def _instead(schema: Schema, found: object) -> str:
    """A hint at what was meant, for the usual slips."""
    types = schema.get("type", [])
    if isinstance(found, str):
        if "boolean" in types and found.lower() in YES_NO:
            return f"; write {YES_NO[found.lower()]}"
        if "null" in types and found.lower() in ("none", "null"):
            return "; write null"
        if "integer" in types or "number" in types:
            return _number_in(found)
    if isinstance(found, float) and "integer" in types and found.is_integer() and abs(found) < 1e16:
        return f"; write {int(found)}"
    if "string" in types and types == "string" and isinstance(found, int | float):
        return "; put quotes around it" if "enum" not in schema else ""
    one_item = types == "array" and schema.get("minItems", 0) <= 1
    if one_item and isinstance(found, str | int | float) and not isinstance(found, bool):
        return f"; write [{quoted(found) if isinstance(found, str) else found}]"
    if types == "string" and isinstance(found, dict) and list(found) == ["stdlib"]:
        return '; put quotes around it: "{stdlib}"'
    return ""


def _number_in(text: str) -> str:
    if re.fullmatch(r"[0-9]{1,3}([_,][0-9]{3})+", text):
        return f"; write {re.sub('[_,]', '', text)}"
    if len(text) < 40 and isinstance(scalars.resolve(text.strip()), int | float):
        return "; remove the quotes"
    return ""
