"""Malformed inputs of every command, from a seed: `KINDS[kind](chance, folder)` writes one below
`folder/in` and gives the command line.

The bases are right (examples, scripts of the zoo, a report, a project); each is then damaged as
bytes, as lines, or as a tree of values.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SPECS = sorted((ROOT / "examples").glob("*.yaml"))
SCRIPTS = (
    sorted((ROOT / "tests" / "zoo").glob("*.py"))[::3]
    + sorted((ROOT / "tests" / "faults").glob("*.py"))[::5]
)
FEW = SCRIPTS[0]
NASTY_BYTES = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\x1b[2J\x1b[31m",
        b"\r",
        b"\t",
        b"\xe2\x80\xae",
        b"\x85",
    ),
    *(
        b"[" * 3000,
        b"{" * 500,
        b"(" * 250,
        b"- " * 800,
        b"a: " * 60,
        b"9" * 6000,
        b"x" * 200_000,
        b"!!python/object:os.system x",
    ),
    *(
        b"&a [*a, *a]",
        b"<<: *nothing",
        b"%YAML 9.9\n---\n",
        b"\n---\n",
        b"? [a]\n: b\n",
        b"::error::x",
        b"##[error]x",
        b"\\N{DASH}",
    ),
    *(
        b"'''",
        b'"""',
        b"\\",
        b"#",
        b"@",
        b"~",
        b"|\n",
        b">-\n",
        b"*x",
        b"&x",
        b"lambda: ",
        b"async ",
        b"yield\n",
        b"return\n",
    ),
)
NASTY_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**63,
        10**400,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        "",
        " ",
        "x",
        "0",
        "-1",
    ),
    *(
        "x" * 20_000,
        "\n",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "::error::x",
        "##[error]x",
        "../../x",
        "/",
        "~",
        "${HOME}",
        "a\nb: c",
        "*",
    ),
    *(
        "{checkpoint}",
        "{",
        "'",
        '"',
        "-",
        "--",
        "--help",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        {"": ""},
        {"a": {"a": {}}},
        [1, "a", None],
    ),
)
WORDS = (
    *("", "-", "--", "-h", "-m", "-x", "=", "new"),
    *("lint", "verify", "spec", "check", "explain", "recipe", "show", "schema"),
    *("--json", "--set", "--nproc", "--steps", "0", "-1"),
    *("9" * 400, "1e3", "nan", "\udcff", "\n", "x" * 5000, "--report"),
    *("json=", "=x", "json", "text", "text=/dev/full", "json=/proc/x/y"),
    *("--only", "--skip", "optimizer", "*", "--tier", "static"),
    *("--baseline", "--config", "--target", "--timeout", "inf", "--reshard-to"),
    *(",,", "1,x", "--save-args", "'", "--reference", "/"),
    *("--dry-run", "--force", "--migrate", "..", "."),
    *("nothing.py", "in/a.py", "in/spec.yaml", "--device", "tpu", "--launcher"),
)  # fmt: skip
ODD_CODE = (
    b"\nclass A(A): pass\nA()()\n",
    b"\ndef f(*a, **k): return f(*a, f, **{'x': f})\nf(f)(f)\n",
    b"\ndef f(x=lambda: f()): return x()\nfully_shard(f(), **{**{}})\n",
    b"\nfrom . import *\nfrom .. import a\nfrom ..... import b\nimport a, a.a.a\n",
    b"\nx = y = z = x if x else lambda *x: (yield)\n",
    (
        b"\nmatch model:\n    case [*_, {'a': b, **c}]:\n        fully_shard(b)\n    case _ if (q"
        b" := model):\n        optimizer.step()\n"
    ),
    (
        b"\nfor optimizer.x[0], *model in [(1, 2)]:\n    while True:\n        optimizer.step()\n   "
        b" else:\n        del optimizer\n"
    ),
    (
        b"\nasync def g():\n    async with a as b, c:\n        async for d in e: await"
        b" fully_shard(*[m for m in model])\n"
    ),
    b"\nx = " + b"(" * 80 + b"model" + b")" * 80 + b"\n",
    b"\nmodel" + b".a" * 900 + b"()\n",
    b"\nfully_shard" + b"(model)" * 80 + b"\n",
    b"\nx = " + b"-" * 900 + b"1\n",
    b"\nx = " + b"model + " * 900 + b"1\n",
    b"\n"
    + b"".join(b"def f%d(): f%d(); f%d()\n" % (n, n + 1, n + 1) for n in range(40))
    + b"f0()\n",
    b"\n@property\n@x.y(z)\nclass B(type(B), metaclass=B): __slots__ = locals()\n",
    b"\nglobal model\nnonlocal_ = [model := fully_shard(m) for m in model for m in m]\n",
    b"\n# fsdp2: ignore[\n# fsdp2: ignore[]\n# fsdp2: ignore[x,,y] \n# fsdp2: ignore\n",
    b"\nparser.add_argument(*'--x', default=[], type=parser, choices=...)\n",
)
COMMANDS = ("new", "recipe", "diff", "update", "lint", "spec", "explain", "verify")

Input = Callable[[random.Random, Path], list[str]]


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The bytes with one to four damages."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(
            (
                _cut,
                _flip,
                _drop,
                _insert,
                _insert,
                _swap_lines,
                _repeat_lines,
                _drop_lines,
                _indent,
                _word,
            )
        )(chance, data)
    return data


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _flip(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 3, 20)) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _drop(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + data[start + chance.choice((1, 5, 100)) :]


def _insert(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.choice(NASTY_BYTES) + data[place:]


def _lines(
    chance: random.Random, data: bytes, change: Callable[[list[bytes], int, int], None]
) -> bytes:
    lines = data.split(b"\n")
    change(lines, chance.randrange(len(lines)), chance.randrange(len(lines)))
    return b"\n".join(lines)


def _swap_lines(chance: random.Random, data: bytes) -> bytes:
    def swap(lines: list[bytes], a: int, b: int) -> None:
        lines[a], lines[b] = lines[b], lines[a]

    return _lines(chance, data, swap)


def _repeat_lines(chance: random.Random, data: bytes) -> bytes:
    return _lines(
        chance, data, lambda lines, a, b: lines.insert(b, lines[a] * chance.choice((1, 1, 50)))
    )


def _drop_lines(chance: random.Random, data: bytes) -> bytes:
    def drop(lines: list[bytes], a: int, b: int) -> None:
        del lines[a : a + chance.choice((1, 2, 10))]

    return _lines(chance, data, drop)


def _indent(chance: random.Random, data: bytes) -> bytes:
    def indent(lines: list[bytes], a: int, b: int) -> None:
        lines[a] = (
            chance.choice((b"  ", b"\t", b"    ")) + lines[a]
            if chance.random() < 0.6
            else lines[a].lstrip()
        )

    return _lines(chance, data, indent)


def _word(chance: random.Random, data: bytes) -> bytes:
    """One word in the place of another of the same file."""
    words = [
        word
        for word in data.replace(b"(", b" ").replace(b")", b" ").replace(b",", b" ").split()
        if len(word) > 1
    ]
    if not words:
        return data
    old, new = chance.choice(words), chance.choice(words)
    return data.replace(old, new, chance.choice((1, 1, -1)))


def bent(chance: random.Random, tree: Any) -> Any:
    """The tree of values with one to three places changed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return copy.deepcopy(chance.choice(NASTY_VALUES))
        holder, key = chance.choice(places)
        what = chance.random()
        if what < 0.55:
            holder[key] = copy.deepcopy(chance.choice(NASTY_VALUES))
        elif what < 0.7:
            del holder[key]
        elif isinstance(holder, dict):
            holder[chance.choice(("nmae", "", "x" * 300, "\x00", "None", key + "s"))] = (
                chance.choice((copy.deepcopy(holder[key]), *copy.deepcopy(NASTY_VALUES)))
            )
        else:
            holder += holder[:50]
    return tree


def _places(tree: Any) -> Any:
    """(container, key) of every value."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def as_yaml(tree: Any) -> bytes:
    text: str = yaml.safe_dump(tree, allow_unicode=True, width=10**9)
    return text.encode("utf-8", "surrogatepass")


def as_json(tree: Any) -> bytes:
    return json.dumps(tree, indent=1).encode("utf-8", "surrogatepass")


def _put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path.relative_to(folder)


def _spec(chance: random.Random, folder: Path) -> str:
    base = chance.choice(SPECS).read_bytes()
    data = (
        damaged(chance, base)
        if chance.random() < 0.5
        else as_yaml(bent(chance, yaml.safe_load(base)))
    )
    return str(_put(folder, "spec.yaml", data))


def spec_check(chance: random.Random, folder: Path) -> list[str]:
    words = ["--json"] if chance.random() < 0.2 else []
    action = chance.choice(
        ("check", "check", "show")
    )  # a spec that a mutation leaves right is not planned: that runs a model
    return [
        "spec",
        action,
        _spec(chance, folder),
        *words,
        *(["--no-plan"] if action == "check" else []),
    ]


def new_dry(chance: random.Random, folder: Path) -> list[str]:
    path = (
        str(_put(folder, "spec.yaml", chance.choice(SPECS).read_bytes()))
        if chance.random() < 0.5
        else _spec(chance, folder)
    )
    words = [
        _argument(f"{_key(chance)}={chance.choice(NASTY_VALUES)}")
        for _ in range(chance.choice((0, 1, 2)))
    ]
    return [
        "new",
        path,
        "out/project",
        "--no-plan",
        "--dry-run",
        *(word for value in words for word in ("--set", value)),
    ]


def _argument(text: str) -> str:
    """As the kernel can hand it over."""
    return os.fsdecode(text.encode("utf-8", "surrogatepass").replace(b"\0", b""))


def _key(chance: random.Random) -> str:
    tree = yaml.safe_load(chance.choice(SPECS).read_bytes())
    section = chance.choice([key for key in tree if isinstance(tree[key], dict)])
    return chance.choice(
        (
            f"{section}.{chance.choice(list(tree[section]))}",
            section,
            f"{section}.{section}",
            "",
            ".",
            "x.y.z",
        )
    )


def new(chance: random.Random, folder: Path) -> list[str]:
    return [
        "new",
        _spec(chance, folder),
        chance.choice(("out/project", "out", "out/a/b/c")),
        "--no-plan",
    ]


VERIFY: dict[str, Any] = {
    "timeout": 60,
    "required": ["parity", "optim-before-shard"],
    "tolerances": {"matches-ddp": {"times": 3, "reason": "one reduction is in float16"}},
    "skip": [{"rule": "root-only-wrap", "reason": "two small layers", "until": "2027-03-31"}],
    "targets": [
        {"name": "a", "script": "a.py", "args": "--small", "nproc": 2},
        {"name": "b", "script": "a.py", "steps": 5},
    ],
}


def verify_yaml(chance: random.Random, folder: Path) -> list[str]:
    _put(folder, "a.py", FEW.read_bytes())
    one = {key: value for key, value in VERIFY.items() if key != "targets"} | {
        "script": "a.py",
        "reshard_to": [1, 4],
        "args": "-x",
    }
    base = chance.choice((VERIFY, one))
    data = damaged(chance, as_yaml(base)) if chance.random() < 0.4 else as_yaml(bent(chance, base))
    _put(folder, "verify.yaml", data)
    return ["verify", "in", "--tier", "static", *chance.choice(([], ["--json"], ["--target", "a"]))]


PYPROJECT = b"""\
[project]
name = "x"

[tool.fsdp2]
timeout = 60
required = ["parity"]
tolerances = {matches-ddp = {times = 3, reason = "float16"}}

[[tool.fsdp2.skip]]
rule = "root-only-wrap"
reason = "two small layers"
until = 2027-03-31

[[tool.fsdp2.targets]]
name = "a"
script = "a.py"
nproc = 2

[[tool.fsdp2.targets]]
name = "b"
script = "a.py"
args = ["--small"]
"""


def pyproject(chance: random.Random, folder: Path) -> list[str]:
    _put(folder, "a.py", FEW.read_bytes())
    _put(folder, "pyproject.toml", damaged(chance, PYPROJECT))
    return ["verify", "in", "--tier", "static"]


@cache
def report() -> Any:
    """A report of the static tier on a faulty script."""
    from verified_fsdp2.verifier.report.json_report import as_dict
    from verified_fsdp2.verifier.rules.lint import lint

    return as_dict(
        lint([ROOT / "tests" / "faults" / "optim_before_shard.py"], command="fsdp2 lint in/a.py")
    )


def baseline(chance: random.Random, folder: Path) -> list[str]:
    _put(folder, "a.py", (ROOT / "tests" / "faults" / "optim_before_shard.py").read_bytes())
    data = (
        damaged(chance, as_json(report()))
        if chance.random() < 0.4
        else as_json(bent(chance, report()))
    )
    path = str(_put(folder, "old.json", data))
    return [
        *chance.choice((["lint", "in/a.py"], ["verify", "in/a.py", "--tier", "static"])),
        "--baseline",
        path,
    ]


def _script(chance: random.Random, folder: Path) -> str:
    data = (
        _python(chance)
        if chance.random() < 0.7
        else damaged(chance, chance.choice(SCRIPTS).read_bytes())
    )
    if chance.random() < 0.1:
        _put(folder, "helper.py", damaged(chance, chance.choice(SCRIPTS).read_bytes()))
        data = b"from helper import *\nimport helper\n" + data
    return str(_put(folder, "a.py", data))


def _python(chance: random.Random) -> bytes:
    """A damaged script that Python can still parse, or what comes nearest in some tries."""
    data = b""
    for _ in range(30):
        data = damaged(chance, chance.choice(SCRIPTS).read_bytes())
        if chance.random() < 0.2:
            data += chance.choice(ODD_CODE)
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            ast.parse(data)
            break
    return data


def lint(chance: random.Random, folder: Path) -> list[str]:
    return [
        "lint",
        _script(chance, folder),
        *chance.choice(([], ["--json"], ["--report", "sarif=out/x"], ["--report", "github"])),
    ]


def migrate(chance: random.Random, folder: Path) -> list[str]:
    return ["lint", "--migrate", _script(chance, folder), *chance.choice(([], ["--json"]))]


def static(chance: random.Random, folder: Path) -> list[str]:
    return [
        "verify",
        _script(chance, folder),
        "--tier",
        "static",
        *chance.choice(([], ["--report", "junit=out/x"])),
    ]


def command_line(chance: random.Random, folder: Path) -> list[str]:
    _put(folder, "a.py", FEW.read_bytes())
    _put(folder, "spec.yaml", SPECS[0].read_bytes())
    words = [chance.choice(WORDS) for _ in range(chance.randrange(7))]
    first = [chance.choice(COMMANDS)] if chance.random() < 0.8 else []
    static = ["--tier", "static"] if first == ["verify"] or "verify" in words else []
    static += ["--dry-run"] if first == ["new"] or "new" in words else []
    return [*first, *words, *(static if "--" not in words else [])]


def output_path(chance: random.Random, folder: Path) -> list[str]:
    path = str(_put(folder, "a.py", FEW.read_bytes()))
    _put(folder, "file", b"x")
    (folder / "in" / "loop").symlink_to("loop")
    (folder / "in" / "dangling").symlink_to("nowhere/x")
    bad = (
        "in",
        "in/a.py/x",
        "in/file/x",
        "in/loop",
        "in/loop/x",
        "out/" + "x" * 300,
        "out/" + "d/" * 3000 + "x",
        "/dev/full",
    )
    bad += (
        "/proc/self/x",
        "out/\udcff",
        "out/\x1b[31m",
        "",
        ".",
        "/",
        "out/a\nb",
        "out/../out/x",
        "/dev/null",
        "in/dangling",
    )
    name = chance.choice(("json", "junit", "sarif", "github", "text", "JSON", ""))
    words = ["--report", f"{name}={chance.choice(bad)}"]
    if chance.random() < 0.3:
        words += ["--report", f"json={chance.choice(bad)}"]
    if chance.random() < 0.2:
        return ["new", str(_put(folder, "spec.yaml", SPECS[0].read_bytes())), chance.choice(bad)]
    return [*chance.choice((["lint", path], ["verify", path, "--tier", "static"])), *words]


@cache
def project() -> tuple[tuple[str, bytes], ...]:
    """The files of a project as `fsdp2 new` writes it."""
    import tempfile

    from verified_fsdp2.skill import scaffold, spec

    with tempfile.TemporaryDirectory() as name:
        scaffold.write(
            scaffold.render(spec.load(ROOT / "examples" / "quickstart.yaml")), Path(name) / "p"
        )
        files = [path for path in sorted(Path(name, "p").rglob("*")) if path.is_file()]
        return tuple((str(path.relative_to(Path(name, "p"))), path.read_bytes()) for path in files)


def _project(chance: random.Random, folder: Path) -> None:
    files = dict(project())
    manifest = ".fsdp2/manifest.json"
    name = chance.choice(
        (manifest, manifest, "spec.yaml", "verify.yaml", chance.choice(list(files)))
    )
    how = chance.random()
    if how < 0.4 and name.endswith(".json"):
        files[name] = as_json(bent(chance, json.loads(files[name])))
    elif how < 0.8:
        files[name] = damaged(chance, files[name])
    else:
        del files[name]
    for path, data in files.items():
        _put(folder, f"../out/project/{path}", data)
    where = folder / "out" / "project" / name
    if how > 0.9:
        where.mkdir(parents=True, exist_ok=True)
    elif how > 0.85:
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(chance.choice((where.name, "/", "/dev/null", "nowhere")))


def diff(chance: random.Random, folder: Path) -> list[str]:
    _project(chance, folder)
    return ["diff", "out/project", *chance.choice(([], ["--json"]))]


def update(chance: random.Random, folder: Path) -> list[str]:
    _project(chance, folder)
    return [
        "update",
        "out/project",
        *chance.choice(([], ["--set", "train.steps=7"], ["--set", "model.layers=3", "--json"])),
    ]


KINDS: dict[str, tuple[Input, int]] = {
    "spec check": (spec_check, 150),
    "new --dry-run": (new_dry, 100),
    "new": (new, 90),
    "verify.yaml": (verify_yaml, 120),
    "pyproject.toml": (pyproject, 80),
    "baseline": (baseline, 80),
    "script for lint": (lint, 130),
    "script for lint --migrate": (migrate, 50),
    "script for verify --tier static": (static, 60),
    "command line": (command_line, 150),
    "output path": (output_path, 70),
    "project for diff": (diff, 50),
    "project for update": (update, 50),
}


def fresh(folder: Path) -> Path:
    """An empty place for one trial: `in` and `out`, `tmp` for what is temporary, `home`."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("in", "out", "tmp", "home"):
        (folder / name).mkdir(parents=True)
    return folder
