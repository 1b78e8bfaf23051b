"""The backward passes that a project writes itself."""

import ast

from ..evidence import Sources
from ..trace.events import Place
from .syntax import walk


def own_backwards(sources: Sources) -> list[Place]:
    """The `backward` of each `torch.autograd.Function` of the project's own files."""
    found = []
    for file in sources.project:
        for node in walk(sources.tree(file)):
            if not isinstance(node, ast.ClassDef) or not any(
                ast.unparse(base).rpartition(".")[2] == "Function" for base in node.bases
            ):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "backward":
                    name, line = f"{node.name}.backward", method.lineno
                    code = sources.line(file, line)
                    found.append(Place(file=file, line=line, function=name, code=code))
    return found
