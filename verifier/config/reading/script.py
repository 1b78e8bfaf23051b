"""The strict reader of Python files."""

from __future__ import annotations

import ast
from pathlib import Path

from ...errors import UserError
from . import inputs


def parse(path: Path) -> tuple[str, ast.Module]:
    """The text of a script and its syntax tree.

    Raises UserError, with the place, if it cannot be read as Python.
    """
    try:
        data = inputs.whole(path, inputs.SCRIPT)
        tree = ast.parse(data, filename=str(path))
    except SyntaxError as error:
        place = f"{path}:{error.lineno or 1}:{error.offset or 1}"
        raise UserError(
            f"{place}: this is not Python: {error.msg}\n    {(error.text or '').strip()[:200]}"
        ) from None
    except (RecursionError, MemoryError):
        raise UserError(f"{path}:1:1: nested too deeply for Python itself to read") from None
    except ValueError as error:
        raise UserError(f"{path}:1:1: this is not Python: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return inputs.normalised(data.decode("utf-8-sig", errors="replace")), tree
