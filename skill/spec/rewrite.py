"""New values put into the text of a spec, so that its comments and its layout stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ...verifier.config.reading.problems import KeyPath
from . import renamed
from .dump import to_yaml


def rewritten(text: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """The text of a valid spec with the values in which `after` differs from `before`.

    Only what fits into one line is put in, and only into keys that both have: see what the result
    says before it is used.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    edits = [
        edit for path, value in _differences(before, after) for edit in _edit(root, path, value)
    ]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def with_new_names(text: str) -> str:
    """The text of a spec with the new names of keys and values (`renamed`); a text that is not YAML
    stays as it is.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    edits = []
    for old, new in renamed.KEYS.items():
        section, key = _node(root, (old.partition(".")[0],)), old.partition(".")[2]
        if isinstance(section, yaml.MappingNode) and _node(root, tuple(new.split("."))) is None:
            edits += [
                (node, new.partition(".")[2]) for node, _ in section.value if node.value == key
            ]
    for path, values in renamed.VALUES.items():
        node = _node(root, tuple(path.split(".")))
        if isinstance(node, yaml.ScalarNode) and node.value in values:
            edits.append((node, values[node.value]))
    for start, end, new in sorted(
        [(*_span(node), name) for node, name in edits] + [*_removed(root, text)], reverse=True
    ):
        text = text[:start] + new + text[end:]
    return text


def _span(node: Any) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def _removed(root: Any, text: str) -> Iterator[tuple[int, int, str]]:
    """The lines of keys that were taken out, where other keys of their section stay."""
    for key in renamed.REMOVED:
        section = _node(root, (key.partition(".")[0],))
        value = _node(root, tuple(key.split(".")))
        if not isinstance(value, yaml.ScalarNode) or section.flow_style or len(section.value) < 2:
            continue
        start = text.rfind("\n", 0, value.start_mark.index) + 1
        yield start, text.find("\n", value.end_mark.index) + 1 or len(text), ""


def _differences(before: Any, after: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            yield from _differences(before[key], after[key], (*path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, (*path, number))
    elif before != after:
        yield path, after


def _edit(root: Any, path: KeyPath, value: Any) -> Iterator[tuple[int, int, str]]:
    """Where the value at `path` stands and what must stand there; a default that was left out
    becomes a line.
    """
    parent = _node(root, path[:-1])
    node = _node(root, path)
    line = to_yaml({str(path[-1]): value})
    if line.count("\n") > 1:
        return
    if isinstance(node, yaml.ScalarNode) or (node is not None and node.flow_style):
        start, end, new = node.start_mark.index, node.end_mark.index, line.partition(":")[2].strip()
        yield start, end, new if start < end else f" {new}"
    elif (
        node is None
        and isinstance(parent, yaml.MappingNode)
        and parent.value
        and not parent.flow_style
    ):
        first = parent.value[0][0].start_mark
        yield first.index - first.column, first.index - first.column, " " * first.column + line


def _node(root: Any, path: KeyPath) -> Any:
    """The node of the value at `path`, or None."""
    for part in path:
        if isinstance(root, yaml.MappingNode):
            found = [value for key, value in root.value if key.value == part]
        elif isinstance(root, yaml.SequenceNode) and isinstance(part, int):
            found = root.value[part : part + 1]
        else:
            found = []
        if not found:
            return None
        root = found[0]
    return root
