"""A template names every import that one of its options needs; a generated module keeps those that
its code uses.
"""

from __future__ import annotations

import ast
import re


def used_imports(code: str) -> str:
    """The module without the imports, at its top, of names that it does not use."""
    tree = ast.parse(code)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines: list[str | None] = list(code.splitlines(keepends=True))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = [
                name for name in node.names if (name.asname or name.name.partition(".")[0]) in used
            ]
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = lines[number] if len(kept) == len(node.names) else None
            if kept and len(kept) < len(node.names):
                node.names = kept
                lines[node.lineno - 1] = f"{ast.unparse(node)}\n"
    return re.sub(
        r'\A((?:""".*?""")?)\n{3,}',
        r"\1\n\n",
        "".join(line for line in lines if line),
        flags=re.DOTALL,
    )
