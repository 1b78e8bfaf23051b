"""Values as literals in generated files: always quoted, never raw text, in the layout of `ruff
format`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LINE = 88
INDENT = 4
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def py(value: Any, name: str = "") -> str:
    """A Python literal; with `name` the whole statement `name = literal`, broken over lines where
    it is long.
    """
    return _layout(value, f"{name} = ", "", 0) if name else _inline(value)


def path(value: Any, name: str) -> str:
    """The statement `name = path`: a relative one starts at the folder of the project."""
    if not isinstance(value, str) or Path(value).is_absolute() or "://" in value:
        return py(value, name)
    here = f"Path(__file__).parent / {_inline(value)}"
    line = f"{name} = str({here})"
    return line if len(line) <= LINE else f"{name} = str(\n{INDENT * ' '}{here}\n)"


def yaml(value: Any) -> str:
    """A YAML value in one line (flow style), read alike by YAML 1.1 and 1.2."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(yaml(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, int) else _quoted(str(value), '"')


def shell(value: Any) -> str:
    """One word of bash, whatever it holds."""
    word = str(value)
    if word.isascii() and word.isprintable():
        return shlex.quote(word)
    quoted = "".join(ESCAPES.get(char) or ("\\'" if char == "'" else _bytes(char)) for char in word)
    return f"$'{quoted}'"


def markdown(value: Any) -> str:
    """A code span that holds the value, whatever it holds."""
    text = "".join(_escaped(char) if char != "\\" else char for char in str(value))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def text(value: str) -> str:
    """A fixed piece of code or prose that a template chose; anything from a spec is refused
    here.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.,:/()`|\[\] -]*", value):
        raise ValueError(f"not a fixed piece of text: {value!r}")
    return value


def dtype(value: str) -> str:
    """The torch dtype of this name."""
    return {"float32": "torch.float32", "bfloat16": "torch.bfloat16"}[value]


def own_import(path: str, name: str) -> str:
    """The import, inside a function, of `package.module:callable` as `name`.

    Not at the top: linters sort it there by where the module lies, beside train.py or installed.
    """
    module, _, attribute = path.partition(":")
    bound = f"{attribute.partition('.')[0]} as {name}"
    pad, line = INDENT * " ", f"{INDENT * ' '}from {module} import {bound}"
    return line if len(line) <= LINE else f"{pad}from {module} import (\n{2 * pad}{bound},\n{pad})"


def factory_call(path: str, name: str = "factory") -> str:
    """The callable of `package.module:callable`, under the name to which its import bound it."""
    _, dot, rest = path.partition(":")[2].partition(".")
    return f"{name}{dot}{rest}"


def signature(parameters: Sequence[str], name: str, returns: str) -> str:
    """The first line of a function, broken over lines where it is long."""
    line = f"def {name}({', '.join(parameters)}) -> {returns}:"
    inner = INDENT * " " + ", ".join(parameters)
    return line if len(line) <= LINE else f"def {name}(\n{inner}\n) -> {returns}:"


FILTERS: dict[str, Callable[..., str]] = {
    "py": py,
    "path": path,
    "yaml": yaml,
    "md": markdown,
    "sh": shell,
    "text": text,
    "dtype": dtype,
}
FILTERS |= {"own_import": own_import, "factory_call": factory_call, "signature": signature}


def _inline(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value, "'" if value.count('"') > value.count("'") else '"')
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_inline(key)}: {_inline(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, float):
        number = repr(value).replace("e+", "e")
        return number if number[-1].isdigit() else f'float("{number}")'
    raise TypeError(f"no literal for {type(value).__name__}")


def _layout(value: Any, before: str, after: str, indent: int) -> str:
    """`before`, the value and `after`: in one line if it fits, else broken."""
    line = f"{' ' * indent}{before}{_inline(value)}{after}"
    if len(line) <= LINE:
        return line
    outer, inner = " " * indent, indent + INDENT
    if isinstance(value, dict | list | tuple) and value:
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        return "\n".join(
            [f"{outer}{before}{opening}", *_items(value, inner), f"{outer}{closing}{after}"]
        )
    wrapped = f"{' ' * inner}{_inline(value)}"
    if indent == 0 and before and len(wrapped) <= LINE:
        return f"{before}(\n{wrapped}\n)"
    return line


def _items(value: dict[str, Any] | list[Any] | tuple[Any, ...], indent: int) -> Iterator[str]:
    if isinstance(value, dict):
        return (_layout(item, f"{_inline(key)}: ", ",", indent) for key, item in value.items())
    return (_layout(item, "", ",", indent) for item in value)


def _quoted(value: str, quote: str) -> str:
    return (
        quote + "".join(f"\\{char}" if char == quote else _escaped(char) for char in value) + quote
    )


def _escaped(char: str) -> str:
    """Printable ASCII as it is; the rest as escapes that Python and YAML both read."""
    if char in ESCAPES:
        return ESCAPES[char]
    if " " <= char <= "~":
        return char
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def _bytes(char: str) -> str:
    """Printable ASCII as it is, the rest as its bytes: octal, since more digits may follow."""
    return char if " " <= char <= "~" else "".join(f"\\{byte:03o}" for byte in char.encode())
