"""Functions of torch are patched once, by one module, and private names of torch stand in one
table.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from records import cases
from verified_fsdp2.verifier.probe.compat import names
from verified_fsdp2.verifier.probe.dispatcher import Call, Dispatcher

VERIFIER = Path(__file__).parents[2] / "verifier"
PYTHONS_OWN = {
    "os",
    "sys",
    "threading",
    "atexit",
    "util",
}  # modules of Python with private names that the probe uses
LIBRARIES = {"_shared_state"}  # of accelerate

WALK = """
import json, sys, types
from pathlib import Path
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.install import install
from verified_fsdp2.verifier.probe.session import Session
from verified_fsdp2.verifier.trace.writer import Writer

folder, mode, backend = sys.argv[1:]
request = Request(
    folder, "t.py", folder, 2,
    mode=mode, backend=backend, steps=1, watch_saves=True, stress=True, fill=True,
    full_precision=mode == "ddp",
)
writer = Writer(Path(folder, "rank0.jsonl"))
session = Session(request, 0, writer, Frames(folder))
install(session)
found, seen = {}, set()
def walk(name, value):
    depth, ours = 0, 0
    while value is not None and depth < 20:
        marked = "__fsdp2_point__" in getattr(value, "__dict__", {})
        ours += marked and value.__code__.co_name == "watched"
        value = getattr(value, "__wrapped__", None)
        depth += 1
    if ours:
        found[name] = ours
for module_name, module in list(sys.modules.items()):
    if module_name.partition(".")[0] not in ("torch", "os") or module is None:
        continue
    for key, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType):
            walk(f"{module_name}.{key}", value)
        elif isinstance(value, type) and id(value) not in seen:
            seen.add(id(value))
            for attribute, method in list(vars(value).items()):
                walk(f"{module_name}.{key}.{attribute}", getattr(method, "__func__", method))
Path(folder, "found.json").write_text(json.dumps(found))
"""
MODES = {"fsdp": "gloo", "ddp": "", "simulate": ""}


@cases(
    "mode", "fsdp", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("ddp", "simulate"))
)
def test_no_function_of_torch_is_wrapped_twice(tmp_path: Path, mode: str) -> None:
    subprocess.run([sys.executable, "-c", WALK, tmp_path, mode, MODES[mode]], check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert {
        "torch.distributed.fsdp.fully_shard",
        "torch.autograd.backward",
        "os.replace",
    } <= found.keys()
    assert any(name.endswith("Module.__call__") for name in found)
    assert (tmp_path / "rank0.jsonl").read_text() == ""  # nothing is missing in this torch


def test_private_names_of_torch_stand_in_one_module() -> None:
    found = [
        f"{path.relative_to(VERIFIER)}:{line} {name}"
        for path in sorted(VERIFIER.rglob("*.py"))
        if {"probe", "launch"} & set(path.parts)
        and "compat" not in path.parts  # no other module imports torch
        for line, name in _private(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports from private modules of torch, private attributes of what is not ours, and symbols of
    the table as text.
    """
    ours = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and _is_name(n.value, {"self", "cls"})
    }
    ours |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    symbols = {
        part for name in names.TABLE for part in (*name.on_instances, name.path.rpartition(".")[2])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for path in [f"{module}.{alias.name}".lstrip(".") for alias in node.names]:
                if path.split(".")[0] == "torch" and any(
                    part.startswith("_") for part in path.split(".")[1:]
                ):
                    yield node.lineno, path
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            known = node.attr in ours | LIBRARIES or _is_name(
                node.value, {"self", "cls", *PYTHONS_OWN}
            )
            if not known and not (
                isinstance(node.value, ast.Call) and _is_name(node.value.func, {"super"})
            ):
                yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Constant)
            and node.value in symbols
            and str(node.value).startswith("_")
        ):
            yield node.lineno, str(node.value)


def _is_name(node: ast.expr, wanted: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in wanted


def test_this_torch_has_every_name_of_the_table() -> None:
    assert [name.path for name in names.TABLE if names.find(name.path) is None] == []


def test_a_name_that_torch_lacks_is_reported() -> None:
    reported: list[str] = []
    dispatcher = Dispatcher(lambda symbol, error: reported.append(symbol))
    dispatcher.around("torch.distributed:no_such_function", before=lambda call: None)
    dispatcher.around("torch.no_such_module:function", before=lambda call: None)
    dispatcher.around(
        "torch.distributed:new_in_another_version", before=lambda call: None, optional=True
    )
    assert reported == ["torch.distributed.no_such_function", "torch.no_such_module.function"]
    with pytest.raises(names.MissingName) as error:
        names.need("torch.distributed:_no_such_name")
    assert error.value.symbol == "torch.distributed._no_such_name"


def test_the_order_of_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    import colorsys

    said: list[Any] = []
    dispatcher = Dispatcher(lambda symbol, error: said.append(("report", type(error))))

    def entering(name: str) -> Any:
        def before(call: Call) -> Any:
            said.append(f"before {name}")
            return lambda: said.append(f"leave {name}")

        return before

    def broken(call: Call) -> None:
        raise KeyError("ours")

    def replaced(call: Call, proceed: Any) -> Any:
        call.args = (1.0, *call.args[1:])
        return (*proceed(), "replaced")

    target = "colorsys:rgb_to_yiq"
    monkeypatch.setattr(colorsys, "rgb_to_yiq", lambda r, g, b: (r, g, b))
    dispatcher.around(target, before=entering("a"), after=lambda call: said.append(call.result))
    dispatcher.around(target, before=broken, replace=replaced)
    dispatcher.around(target, before=entering("b"))
    dispatcher.install()
    assert colorsys.rgb_to_yiq(0.0, 0.0, 0.0) == (1.0, 0.0, 0.0, "replaced")
    result = (1.0, 0.0, 0.0, "replaced")
    assert said == ["before a", ("report", KeyError), "before b", "leave b", "leave a", result]
    said.clear()
    with pytest.raises(TypeError):  # the script's own: no `after`, every `leave`
        colorsys.rgb_to_yiq()
    assert said == ["before a", ("report", KeyError), "before b", "leave b", "leave a"]
