"""Reads from the sources which settings a script takes: argparse, click, typer, fire, dataclasses,
hydra, and configuration files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..config.option import SET, Option
from ..config.settings import configs, flat, load
from ..evidence import Sources

_DEEPEST = 6  # levels of dataclasses
# How a reader of dataclasses spells a field: the prefix, the separator of levels, and what "_"
# becomes.
_READERS = {
    "cli": ("--", ".", "-"),  # tyro.cli
    "CLI": ("--", ".", "_"),  # jsonargparse
    "HfArgumentParser": ("--", "", "_"),
    "add_arguments": ("--", ".", "_"),  # simple_parsing
    "TrlParser": ("--", "", "_"),
    "structured": ("", ".", "_"),  # OmegaConf
    "parse_args": ("--", ".", "_"),  # of a project's own
}
# Classes of transformers and trl whose fields are these, among others.
_TRAINERS = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "DPOConfig",
    "GRPOConfig",
    "RewardConfig",
)
_TRAINER = {"output_dir": "", "save_steps": "500", "max_steps": "-1", "resume_from_checkpoint": ""}
# Actions of argparse that take no value.
_NO_VALUE = {
    *("store_true", "store_false", "store_const", "append_const", "count", "help", "version"),
    "BooleanOptionalAction",
}
_TAKES = {
    **dict.fromkeys(("int", "float", "INT", "FLOAT", "IntRange", "FloatRange"), "number"),
    **dict.fromkeys(("bool", "BOOL"), "switch"),
    **dict.fromkeys(("Choice", "Literal"), "choice"),
}
_FUNCTIONS = {"Fire": "_", "run": "-"}  # fire.Fire, typer.run: the parameters of a function


def options_of(
    sources: Sources, args: Sequence[str] = (), cwd: Path = Path()
) -> tuple[Option, ...]:
    """The settings of the sources, and the keys of the configuration files that the arguments
    name.
    """
    reader = _Reader(sources)
    found = [option for file in sources.project for option in reader.read(file)]
    merged = any(_merges(sources.tree(file)) for file in sources.project)
    for path in configs(args, cwd):
        found += [
            Option(key if merged else f"{SET}{key}", False, str(value), str(path))
            for key, value in flat(load(path))
        ]
    return tuple(dict.fromkeys(found))


def _merges(tree: ast.Module) -> bool:
    """Whether a file merges `key=value` of the command line into its configuration."""
    calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(call.endswith(("OmegaConf.from_cli", "OmegaConf.from_dotlist")) for call in calls)


@dataclass(eq=False)
class _Reader:
    sources: Sources

    def __post_init__(self) -> None:
        nodes = [
            (node, file)
            for file in self.sources.project
            for node in ast.walk(self.sources.tree(file))
        ]
        self._classes = {
            node.name: (node, file)
            for node, file in reversed(nodes)
            if isinstance(node, ast.ClassDef)
        }
        self._functions = {
            n.name: (n, file) for n, file in reversed(nodes) if isinstance(n, ast.FunctionDef)
        }

    def read(self, file: str) -> Iterator[Option]:
        for node in ast.walk(self.sources.tree(file)):
            if isinstance(node, ast.Call):
                yield from self._called(node, file)
            elif isinstance(node, ast.FunctionDef):
                decorators = {_name(one) for one in node.decorator_list}
                # typer, where click has options
                if "command" in decorators and "option" not in decorators:
                    yield from _parameters(node, file, "-")

    def _called(self, call: ast.Call, file: str) -> Iterator[Option]:
        name = _name(call)
        words = {word.arg: word.value for word in call.keywords}
        name = "add_argument" if name in self._short(file) else name
        if name in ("add_argument", "option"):
            yield from _argument(call, words, file)
        elif name in _READERS and (call.args or words):
            values = self._assigned(file)
            for arg in (*call.args, *words.values()):
                for inner in getattr(values.get(_name(arg), arg), "elts", [arg]):
                    yield from self._fields(_name(inner), *_READERS[name])
        elif name in _FUNCTIONS and call.args and _name(call.args[0]) in self._functions:
            yield from _parameters(*self._functions[_name(call.args[0])], _FUNCTIONS[name])
        elif name == "main" and "config_name" in words:  # @hydra.main
            folder = Path(file).parent / _text(words.get("config_path"))
            yield from _hydra(folder, _text(words["config_name"]))

    def _short(self, file: str) -> set[str]:
        """Other names of `add_argument` in a file: `add = parser.add_argument`."""
        return {
            name for name, value in self._assigned(file).items() if _name(value) == "add_argument"
        }

    @cache  # noqa: B019 (a reader lives as long as one reading)
    def _assigned(self, file: str) -> dict[str, ast.expr]:
        """{name: its value}, for what is assigned once in a file."""
        nodes = (n for n in ast.walk(self.sources.tree(file)) if isinstance(n, ast.Assign))
        return {
            target.id: n.value
            for n in nodes
            for target in n.targets
            if isinstance(target, ast.Name)
        }

    def _fields(
        self, name: str, prefix: str, dot: str, dash: str, above: str = "", depth: int = 0
    ) -> Iterator[Option]:
        """The annotated fields of a class of the project, those of its bases and of fields of such
        classes included.
        """
        node, file = self._classes.get(name, (None, ""))
        if node is None and name in _TRAINERS:
            yield from (Option(prefix + key, False, default) for key, default in _TRAINER.items())
        if node is None or depth > _DEEPEST:
            return
        for base in node.bases:
            yield from self._fields(_name(base), prefix, dot, dash, above, depth + 1)
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            inner, own = _name(field.annotation), field.target.id.replace("_", dash)
            if inner in self._classes and dot:
                yield from self._fields(inner, prefix, dot, dash, f"{above}{own}{dot}", depth + 1)
            else:
                flag = bool(prefix) and inner == "bool" and dash == "-"
                name, default = f"{prefix}{above}{own}", _text(_default(field.value))
                takes = _takes(field.annotation)
                yield Option(name, flag, default, file, field.lineno, takes)


def _argument(call: ast.Call, words: Mapping[str | None, ast.expr], file: str) -> Iterator[Option]:
    """The option of a call of `add_argument` or `option`, if it has a long name."""
    spelled = [a.value for a in call.args if isinstance(a, ast.Constant)]
    longs = [str(name) for name in spelled if str(name).startswith("--")]
    if not longs:
        return
    action = _text(words.get("action")).rpartition(".")[2]
    long, _, off = longs[0].partition("/")
    flag = (
        bool(off)
        or action in _NO_VALUE
        or _text(words.get("is_flag")) == "True"
        or _text(words.get("nargs")) == "0"
    )
    takes = "choice" if "choices" in words else _takes(words.get("type"))
    default = _text(words.get("default"))
    yield Option(long, flag, default, file, call.lineno, takes, parsed=True)


def _hydra(folder: Path, name: str, above: str = "") -> Iterator[Option]:
    """The keys of a configuration of hydra, and of the groups that its `defaults` name."""
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    data = load(path)
    for key, value in flat(data):
        yield Option(f"{above}{key}", False, str(value), str(path))
    listed = data.get("defaults") if isinstance(data, dict) and not above else None
    for entry in listed if isinstance(listed, list) else ():
        for group, chosen in entry.items() if isinstance(entry, dict) else ():
            if "/" not in str(group) and isinstance(chosen, str):
                yield from _hydra(folder / str(group), chosen, f"{group}.")


def _takes(node: ast.expr | None) -> str:
    """What value an annotation, or a type of a command line, stands for (Option.takes)."""
    if isinstance(node, ast.BinOp):  # int | None
        node = node.left
    literal = isinstance(node, ast.Subscript) and _name(node.value) == "Literal"
    return "choice" if literal else _TAKES.get(_name(node), "")


def _parameters(function: ast.FunctionDef, file: str, dash: str) -> Iterator[Option]:
    """The parameters of a function that have a default, as options of a command line."""
    arguments = function.args
    paired = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
    paired += [
        (a, d)
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if d is not None
    ]
    for argument, default in paired:
        name, text = f"--{argument.arg.replace('_', dash)}", _text(_default(default))
        flag = dash == "-" and text in ("True", "False")
        yield Option(name, flag, text, file, argument.lineno, _takes(argument.annotation))


def _default(value: ast.expr | None) -> ast.expr | None:
    """The value of a default; that of `field(default=...)` or `typer.Option(...)` where it is
    one.
    """
    if isinstance(value, ast.Call):
        words = {word.arg: word.value for word in value.keywords}
        return words.get("default", value.args[0] if value.args else None)
    return value


def _name(node: ast.expr | None) -> str:
    """The last part of a name, of the name of a call, or of the only class of an annotation."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _name(node.slice) if _name(node.value) in ("Optional", "Annotated", "type") else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return "" if node.value is None else str(node.value)
    return "" if node is None else ast.unparse(node)
