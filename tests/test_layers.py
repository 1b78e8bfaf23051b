"""Imports run one way, those inside functions and those for types too: no cycles, layers go
downwards, and `verifier` never imports `skill`.
"""

import ast
import re
import statistics
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "verified_fsdp2"

Layers = tuple[tuple[str, ...], ...]
# From top to bottom: a module imports from its own layer and from those below it.
SKILL: Layers = (
    ("__main__",),
    ("cli",),
    ("convert", "installer", "capacity", "progress", "recipes", "reference", "reports", "update"),
    ("scaffold",),
    ("spec",),
    ("__init__", "atomic_write", "copies", "output", "snippet"),
)
VERIFIER: Layers = (
    ("__main__", "pipeline", "compare_windows", "integrations", "guard"),
    ("stages", "execute", "judge"),
    ("judging",),
    ("report", "rules"),
    ("analysis",),
    ("source", "launch", "probe"),
    ("isolation",),
    ("__init__", "trace", "evidence", "finding", "verdict", "config", "errors", "tolerances"),
)
LOOSE = {
    "__init__",
    "__main__",
    "pipeline",
    "compare_windows",
    "execute",
    "judge",
    "evidence",
    "finding",
    "verdict",
    "errors",
    "tolerances",
}
LONGEST, MEDIAN = 400, 110  # lines of a module
JUDGING = ("verifier.analysis", "verifier.rules", "verifier.judge", "verifier.judging")
READING = {
    *(
        "open",
        "read_text",
        "read_bytes",
        "exists",
        "is_file",
        "is_dir",
        "glob",
        "rglob",
        "iterdir",
        "stat",
        "resolve",
    ),
    *("isfile", "isdir", "listdir", "scandir"),
}
READERS = {"glob", "io", "linecache", "mmap", "shutil", "subprocess", "tempfile", "tokenize"}
AT_IMPORT = {"verifier.rules"}  # finds the rules by looking into its own folder


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below a node, those of `if TYPE_CHECKING` too."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom))


def sources() -> dict[str, Path]:
    found = {"": ROOT / "__init__.py"}
    for path in sorted([*(ROOT / "skill").rglob("*.py"), *(ROOT / "verifier").rglob("*.py")]):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = (
            path
        )
    return found


SOURCES = sources()
NODES = {
    name: list(imports(ast.parse(path.read_text(encoding="utf-8"))))
    for name, path in SOURCES.items()
}


def imported(name: str, node: ast.ImportFrom) -> Iterator[str]:
    """The modules of the package that `from X import a, b` in the module `name` runs, the packages
    that hold them too.
    """
    level = node.level - (SOURCES[name].name == "__init__.py")
    parts = name.split(".") if name else []
    source = ".".join([*parts[: len(parts) - level], *([node.module] if node.module else [])])
    for alias in node.names:
        submodule = f"{source}.{alias.name}".lstrip(".")
        found = submodule if submodule in SOURCES else source
        yield found
        packages = [found[:end] for end, char in enumerate(found) if char == "."]
        yield from (package for package in packages if not f"{name}.".startswith(f"{package}."))


def edges() -> dict[str, set[str]]:
    own = {
        name: [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level]
        for name, nodes in NODES.items()
    }
    return {
        name: {module for node in nodes for module in imported(name, node)}
        for name, nodes in own.items()
    }


EDGES = edges()


def cycle(top: str) -> list[str]:
    """One import cycle among the modules of a folder; empty if there is none."""
    try:
        TopologicalSorter(
            {name: below for name, below in EDGES.items() if name.startswith(top)}
        ).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer(name: str, layers: Layers) -> int | None:
    """The number of the layer of a module, counted from the top; None if it has none."""
    part = [*name.split("."), "__init__"][1]
    return next((number for number, parts in enumerate(layers) if part in parts), None)


def upwards(top: str, layers: Layers) -> list[str]:
    names = [name for name in EDGES if name.split(".")[0] == top]
    unplaced = [f"{name} has no layer" for name in names if layer(name, layers) is None]
    found = [(name, below) for name in names for below in EDGES[name] if below.split(".")[0] == top]
    up = [
        (name, below)
        for name, below in found
        if (layer(below, layers) or 0) < (layer(name, layers) or 0)
    ]
    return unplaced + [f"{name} imports {below}" for name, below in up]


def absolute(nodes: list[ast.Import | ast.ImportFrom]) -> list[str]:
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return found + [
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    ]


def test_every_import_is_resolved() -> None:
    """A name that the resolver gets wrong would hide an edge."""
    assert {below for found in EDGES.values() for below in found} <= set(SOURCES)
    assert (
        "verifier.errors" in EDGES["skill.cli.verify"]
        and "skill.atomic_write" in EDGES["skill.cli.verify"]
    )
    assert "verifier.pipeline" in EDGES["skill.cli.verify"]
    assert not EDGES["skill.cli.update"] & {"skill.cli"}


def test_inside_the_package_imports_are_relative() -> None:
    for name, nodes in NODES.items():
        assert not [
            m for m in absolute(nodes) if m.partition(".")[0] in (PACKAGE, "skill", "verifier")
        ], name


def test_the_verifier_never_imports_the_skill() -> None:
    found = [
        (name, below)
        for name, found in EDGES.items()
        for below in found
        if below.startswith("skill")
    ]
    assert [name for name, _ in found if not name.startswith("skill")] == []


@pytest.mark.parametrize(
    ("top", "layers"), [("skill", SKILL), ("verifier", VERIFIER)], ids=["skill", "verifier"]
)
def test_imports_go_downwards_without_a_cycle(top: str, layers: Layers) -> None:
    assert (cycle(top), upwards(top, layers)) == ([], [])


def test_launch_knows_nothing_of_the_probe() -> None:
    """What a rank does is given to it."""
    assert [
        n
        for n in EDGES
        if n.startswith("verifier.launch") and "verifier.probe" in " ".join(EDGES[n])
    ] == []


def test_only_what_runs_in_ranks_imports_torch() -> None:
    able = ("verifier.launch", "verifier.probe", "verifier.guard")
    others = [n for n in NODES if n.startswith("verifier") and not n.startswith(able)]
    assert [
        n for n in others if any(m.partition(".")[0] == "torch" for m in absolute(NODES[n]))
    ] == []


def test_after_the_plan_nobody_asks_the_target() -> None:
    able = (
        "verifier.pipeline",
        "verifier.stages",
        "verifier.integrations",
        "verifier.config",
        "skill",
    )
    found = [name for name, below in EDGES.items() if "verifier.config.target" in below]
    assert [name for name in found if not name.startswith(able)] == []
    texts = {
        name: SOURCES[name].read_text(encoding="utf-8")
        for name in EDGES
        if not name.startswith(able)
    }
    asking = re.compile(r"\bTarget\b|settings\.target|\btarget\.policy\b")
    assert [name for name, text in texts.items() if asking.search(text)] == []


def test_the_plan_judges_nothing() -> None:
    """What rules find so far is handed in by the pipeline; and the judge plans nothing."""
    plan = [name for name in EDGES if name.startswith("verifier.stages")]
    assert [name for name in plan if "verifier.judge" in EDGES[name]] == []
    assert [below for below in EDGES["verifier.judge"] if below.startswith("verifier.stages")] == []
    calls = re.compile(r"\.(judge|applies|unseen)\(")
    texts = {name: SOURCES[name].read_text(encoding="utf-8") for name in plan}
    assert [name for name, text in texts.items() if calls.search(text)] == []


def test_modules_that_texts_name_are_there() -> None:
    """`(events/data.py)` or `zoo/hsdp.py` in a comment or docstring is a module, or a case that
    forced an exception: it is the end of a path.
    """
    patterns = ("tests/zoo/*.py", "tests/faults/*", "benchmarks/**/*.py")
    cases = [path for pattern in patterns for path in ROOT.glob(pattern)]
    paths = (path.relative_to(ROOT).with_suffix("") for path in (*SOURCES.values(), *cases))
    there = [f"/{path.as_posix()}" for path in paths]
    lost = set()
    for name, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        modules = re.findall(r"\((?:see )?`?([\w/]+\.py)`?\)", text)
        for named in (*modules, *re.findall(r"\b((?:zoo|faults)/\w+)\b(?!\*)", text)):
            if not any(one.endswith(f"/{named.removesuffix('.py')}") for one in there):
                lost.add((name, named))
    assert lost == set()


def test_there_are_few_loose_modules() -> None:
    assert len(list((ROOT / "skill").glob("*.py"))) <= 10
    assert {path.stem for path in (ROOT / "verifier").glob("*.py")} == LOOSE


def test_modules_are_short() -> None:
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in SOURCES.items()
    }
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
    median = statistics.median(lines[name] for name in lines if name.startswith("verifier"))
    assert median <= MEDIAN, f"the median of verifier/ is {median} lines"


def reads(tree: ast.AST) -> list[str]:
    """What of a module reads a file or asks for one."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [
        call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls
    ]
    modules = [
        module for module in absolute(list(imports(tree))) if module.partition(".")[0] in READERS
    ]
    return [name for name in named if name in READING] + modules


def test_judging_reads_no_file() -> None:
    judging = [name for name in SOURCES if name.startswith(JUDGING) and name not in AT_IMPORT]
    found = {name: reads(ast.parse(SOURCES[name].read_text(encoding="utf-8"))) for name in judging}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_only_lint_asks_for_modules_that_read_files() -> None:
    """`source` has modules that follow files; the rules and the judge use its pure ones."""
    readers = {
        f"verifier.source.{name}" for name in ("lint", "scan", "files", "sources", "migration")
    }
    readers.add("verifier.launch.client")
    judging = [name for name in EDGES if name.startswith(JUDGING) and name != "verifier.rules.lint"]
    found = {name: EDGES[name] & readers for name in judging}
    assert {name: below for name, below in found.items() if below} == {}
