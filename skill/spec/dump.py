"""Plain data as YAML in block style; text that any YAML version would take for something else is
quoted.
"""

from __future__ import annotations

from typing import Any

import yaml

from ...verifier.config.reading import scalars


class _Dumper(yaml.SafeDumper):
    """PyYAML quotes what YAML 1.1 would misread; this also quotes what 1.2 would."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # only what the reader takes for plain text may stay plain
        needs_quotes = not isinstance(_resolved(value), str) or "{" in value or "\n" in value
        return self.represent_scalar(
            "tag:yaml.org,2002:str", value, style='"' if needs_quotes else None
        )

    def row(self, value: list[Any]) -> yaml.SequenceNode:
        short = all(isinstance(item, int | float) for item in value)
        return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(list, _Dumper.row)


def to_yaml(data: Any) -> str:
    """The data in block style, with lists of numbers in one line."""
    return str(
        yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)
    )


def _resolved(value: str) -> scalars.Scalar:
    try:
        return scalars.resolve(value)
    except ValueError:
        return None
