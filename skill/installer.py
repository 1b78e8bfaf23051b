"""Installs a lean copy of the pack where coding agents look for skills: all or nothing, never over
an edited file.

Where each client looks, by its own documentation (read in November 2026):

- Claude Code: code.claude.com/docs/en/skills, "Where skills live".
- Codex: developers.openai.com/codex/skills, "Where to save skills".
- Cursor: cursor.com/docs/context/skills, "Skill directories"; it also loads `.agents/skills`, and
  `.claude/skills` of project and user.
- Gemini CLI: geminicli.com/docs/cli/using-agent-skills, "Discovery tiers"; `.agents/skills` is an
  alias, which wins.
- OpenCode: opencode.ai/v2/docs/skills, "Discovery"; it also loads `.claude/skills` and
  `.agents/skills`.
- GitHub Copilot: docs.github.com/en/copilot, "Create skills"; it also loads `.claude/skills` and
  `.agents/skills`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..verifier.config.reading import inputs
from ..verifier.errors import UserError
from . import copies
from .atomic_write import is_inside, obstacle, write_files

NAME = "verified-fsdp2"
MANIFEST = "INSTALLED.json"
_RULES = "references/contract.md"
PACK = Path(__file__).resolve().parents[1]

# client: (folder below a project, folder below the home)
PLACES = {
    "claude": (".claude/skills", ".claude/skills"),
    "codex": (".agents/skills", ".agents/skills"),
    "cursor": (".cursor/skills", ".cursor/skills"),
    "gemini": (".gemini/skills", ".gemini/skills"),
    "opencode": (".opencode/skills", ".config/opencode/skills"),
    "copilot": (".github/skills", ".copilot/skills"),
}
# The two folders that reach all of them, in a project and for a user.
SHARED = {
    ".claude/skills": ("claude", "cursor"),
    ".agents/skills": ("codex", "gemini", "opencode", "copilot"),
}
_FILES = ("SKILL.md", "LICENSE", "__init__.py")
_FOLDERS = ("references", "templates", "examples", "skill", "verifier")
# Examples of one option each, which `fsdp2 spec explain` shows as well, and of what a larger one
# holds.
_LEFT_OUT = {
    f"examples/{name}.yaml"
    for name in (
        "ac",
        "adamw8bit",
        "bf16",
        "chunked-loss",
        "compile",
        "export",
        "freeze",
        "hsdp",
        "jsonl",
        "mixture",
        "muon",
        "offload",
        "reshard-blocks",
        "reshard-int",
        "transformers-tp",
        "two-nodes",
    )
} | {
    "examples/notes.jsonl",
    *(
        f"examples/day/{name}"
        for name in ("README.md", "chat.yaml", "pretrain.yaml", "tokenizer.py")
    ),
}
_SUFFIXES = (".py", ".md", ".j2", ".jinja", ".json", ".jsonl", ".yaml")
_READ = (
    "SKILL.md",
    "LICENSE",
    "references",
    "examples",
)  # what agents read: a thin copy, beside its launcher
_LAUNCHER = f'''\
#!/usr/bin/env python3
"""Calls verified-fsdp2, of the version that wrote this copy: in this Python, as `fsdp2` on the
path, or in the project's .venv.
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

try:
    found = metadata.version("{NAME}")
except metadata.PackageNotFoundError:
    found = ""
if found != "{__version__}":
    places = [None, *(folder / ".venv" / "bin" for folder in Path(__file__).resolve().parents[4:5])]
    for command in filter(None, (shutil.which("fsdp2", path=place) for place in places)):
        printed = subprocess.run([command, "--version"], capture_output=True, text=True).stdout.split()
        if printed[-1:] == ["{__version__}"]:
            os.execv(command, [command, *sys.argv[1:]])
    there = f"has {NAME} {{found}}" if found else "has no {NAME}"
    print(f"fsdp2: {{sys.executable}} {{there}}; this skill needs {__version__}: install that version,", file=sys.stderr)
    print("or the skill again, with --full: a copy that needs no install", file=sys.stderr)
    sys.exit(2)

from verified_fsdp2.skill.cli import main

sys.exit(main())
'''
# The tools of a project that holds a copy leave it alone: ruff takes the nearest configuration of a
# file; git no bytecode.
GUEST = {
    "ruff.toml": (
        b'# Linters of the project leave this copy alone.\nexclude = ["*"]\n\n[lint]\nselect = []\n'
    ),
    ".gitignore": b"__pycache__/\n",
}


@dataclass(frozen=True)
class Target:
    """One folder for the copy, and the clients that read it.

    `refusal`: why nothing is written there.
    """

    folder: Path
    clients: tuple[str, ...]
    refusal: str = ""


@dataclass
class Plan:
    """The changes of one folder.

    `contents`: path to new content, None to remove it; `kept`: files that a person edited.

    `changed`: of an upgrade, the texts that differ, and the rules that are new or gone.
    """

    target: Target
    action: str
    previous: str | None = None
    contents: dict[str, bytes | None] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def pack_files(pack: Path = PACK) -> dict[str, bytes]:
    """The files of an installed copy, path to content: the text of the skill, and what its commands
    need to run, in few files.
    """
    if (pack / copies.SOURCES).is_dir():  # a copy itself
        return _of_copy(pack)
    return copies.join(_of_pack(pack)) | GUEST


def _of_copy(copy: Path) -> dict[str, bytes]:
    """The files of the copy that is running."""
    manifest = _read(copy)
    files = {name: _content(copy / name) for name in manifest[1]} if manifest else {}
    found = {name: data for name, data in files.items() if data is not None}
    if not files or found != files:
        missing = ", ".join(name for name in files if name not in found) or MANIFEST
        raise UserError(f"{copy} is not a complete copy of {NAME}: {missing} is missing")
    return found


def _of_pack(pack: Path) -> dict[str, bytes]:
    """The files of the repository, or of an installed package, that belong in a copy."""
    found = list(_FILES)
    for folder in _FOLDERS:
        for path in sorted((pack / folder).rglob("*")):
            name = path.relative_to(pack)
            hidden = path.name[0] == "." or any(part[0] in "._" for part in name.parts[:-1])
            if (
                path.suffix in _SUFFIXES
                and path.is_file()
                and not hidden
                and name.as_posix() not in _LEFT_OUT
            ):
                found.append(name.as_posix())
    if missing := [name for name in found if not (pack / name).is_file()]:
        raise UserError(f"{pack} is not a complete copy of {NAME}: {', '.join(missing)} is missing")
    return {name: (pack / name).read_bytes() for name in found}


def thin_files(pack: Path = PACK) -> dict[str, bytes]:
    """The files of a thin copy: what an agent reads, and a launcher that calls the installed
    package of the same version.
    """
    read = {name: data for name, data in pack_files(pack).items() if name.split("/")[0] in _READ}
    return read | {"skill/__main__.py": _LAUNCHER.encode()} | GUEST


def files_for(folder: Path, thin: bool | None = None) -> dict[str, bytes]:
    """The files of a copy there; `thin` None: as the copy that is there, and of a new one thin if
    this package is installed.
    """
    if thin is None:
        _, there = _read(folder) or ("", {})
        thin = not any(name.startswith("verifier/") for name in there) if there else _is_installed()
    return thin_files() if thin else pack_files()


def _is_installed() -> bool:
    """Whether a thin copy would find this package, of this version."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(NAME) == __version__ and not (PACK / copies.SOURCES).is_dir()
    return False


def targets(clients: Sequence[str], user: bool, everywhere: bool = False) -> list[Target]:
    """The folders for these clients; `all` is the two that reach all of them.

    `everywhere`: only existing folders, and for `all` each client's own, too.
    """
    base = Path(os.environ.get("HOME", "")) if user else Path.cwd()
    if not base.is_absolute():
        raise UserError("HOME is not set to a folder")
    wanted = [(PLACES[client][user], client) for client in clients if client != "all"]
    if "all" in clients:
        wanted += [(place, client) for place, served in SHARED.items() for client in served]
        wanted += [(places[user], client) for client, places in PLACES.items() if everywhere]
    found: dict[str, Target] = {}
    for subfolder, client in dict.fromkeys(wanted):
        folder = base / subfolder / NAME
        refusal = _refusal(folder, base)
        if refusal and not everywhere:
            raise UserError(refusal)
        if not everywhere or os.path.lexists(folder):
            real = str(folder) if refusal else os.path.realpath(folder)
            one = found.get(real, Target(folder, (), refusal))
            found[real] = Target(
                one.folder, tuple(dict.fromkeys((*one.clients, client))), one.refusal
            )
    return list(found.values())


def _refusal(folder: Path, base: Path) -> str:
    """Why nothing is written there: not a folder, a link, outside of the project or home, or not
    writable; else empty.
    """
    if folder.is_symlink():
        return (
            f"{folder} is a symbolic link to {folder.readlink()}: it was not written by `fsdp2"
            " install`"
        )
    real = Path(os.path.realpath(folder))
    if not real.is_relative_to(os.path.realpath(base)):
        return f"{folder} leads out of {base}, to {real}"
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is in the way: it must be a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written by you"


def plan_install(target: Target, files: Mapping[str, bytes], force: bool = False) -> Plan:
    """The changes that install exactly these files; edited files are kept unless `force`."""
    folder = target.folder
    manifest = _read(folder)
    if Path(os.path.realpath(folder)) == PACK:
        return Plan(target, "none", manifest[0] if manifest else None)  # the copy that is running
    if manifest is None and folder.is_dir() and any(folder.iterdir()):
        if (folder / ".git").exists():
            raise UserError(f"{folder} is a git clone: `git pull` brings it up to date")
        if not force:
            raise UserError(
                f"{folder} was not written by `fsdp2 install`; move it away, or --force to write"
                " into it"
            )
    previous, before = manifest or (None, {})
    plan = Plan(target, "install" if manifest is None else "upgrade", previous)
    for path in (*files, *(old for old in before if old not in files), MANIFEST):
        if blocked := obstacle(folder, path, replace_link=True):
            raise UserError(blocked)
    _add_changes(plan, before, files, force)
    plan.contents |= dict.fromkeys(_all_compiled(folder, plan.removed))
    if plan.action == "upgrade":
        plan.changed = _changed(folder, files, plan)
    record = _record({path: _digest(data) for path, data in files.items()})
    if _hash(folder / MANIFEST) != _digest(record):
        plan.contents[MANIFEST] = record
    plan.action = plan.action if plan.contents else "none"
    return plan


def plan_uninstall(target: Target, force: bool = False) -> Plan:
    """The changes that remove what was installed, and its compiled files; edited files stay unless
    `force`.
    """
    folder = target.folder
    if target.refusal:
        return Plan(target, "foreign")
    manifest = _read(folder)
    if manifest is None:
        return Plan(target, "foreign" if any(folder.iterdir()) else "absent")
    previous, before = manifest
    plan = Plan(target, "uninstall", previous)
    _add_changes(plan, before, {}, force)
    plan.contents |= dict.fromkeys(_all_compiled(folder, plan.removed))
    plan.contents[MANIFEST] = (
        _record({path: before[path] for path in plan.kept}) if plan.kept else None
    )
    return plan


def _add_changes(
    plan: Plan, before: Mapping[str, str], files: Mapping[str, bytes], force: bool
) -> None:
    """From the copy that was installed (path to hash) to one with these files; edited files are
    kept unless `force`.
    """
    folder = plan.target.folder
    for path in dict.fromkeys((*files, *before)):
        data, there = files.get(path), _hash(folder / path)
        if there == (None if data is None else _digest(data)) or obstacle(
            folder, path, replace_link=True
        ):
            continue
        if there is not None and there != before.get(path) and not force:
            plan.kept.append(path)
            continue
        plan.contents[path] = data
        (plan.removed if data is None else plan.replaced if there else plan.new).append(path)


def apply(plans: Sequence[Plan]) -> None:
    """Make all changes, or none. Raises UserError."""
    done: list[tuple[Path, dict[str, bytes | None]]] = []
    try:
        for plan in plans:
            folder = plan.target.folder
            if plan.contents:
                before = {path: _content(folder / path) for path in plan.contents}
                write_files(plan.contents, folder)
                done.append((folder, before))
                _remove_if_empty(folder)
        for plan in plans:
            if plan.action == "uninstall":
                # bytecode, which nothing else reads
                shutil.rmtree(copies.cache(str(plan.target.folder)), ignore_errors=True)
    except BaseException:
        for folder, before in reversed(done):
            write_files(before, folder)
            _remove_if_empty(folder)
        raise


def digest(files: Mapping[str, bytes]) -> str:
    """Of all files: what `--check` shows, and CI can pin."""
    return _digest("".join(f"{path} {_digest(files[path])}\n" for path in sorted(files)).encode())


def _changed(folder: Path, files: Mapping[str, bytes], plan: Plan) -> dict[str, list[str]]:
    """What an upgrade to these files changes for its readers."""
    texts = [path for path in (*plan.new, *plan.replaced, *plan.removed) if path.endswith(".md")]
    old, new = _rules(_content(folder / _RULES)), _rules(files.get(_RULES))
    return {"texts": sorted(texts), "rules_new": sorted(new - old), "rules_gone": sorted(old - new)}


def _rules(contract: bytes | None) -> set[str]:
    """The rules that references/contract.md lists."""
    return set(re.findall(r"^- \*\*([a-z0-9-]+)\*\*", (contract or b"").decode(), re.MULTILINE))


def _all_compiled(folder: Path, paths: Sequence[str]) -> list[str]:
    """The compiled files of modules below a folder."""
    return [
        file.relative_to(folder).as_posix() for path in paths for file in _compiled(folder / path)
    ]


def _compiled(source: Path) -> list[Path]:
    """The compiled files of a module."""
    cache = source.parent / "__pycache__"
    if source.suffix != ".py" or cache.is_symlink() or not cache.is_dir():
        return []
    return [
        file
        for file in cache.iterdir()
        if file.suffix == ".pyc" and file.name.split(".")[0] == source.stem
    ]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _read(folder: Path) -> tuple[str, dict[str, str]] | None:
    """(version, {path: hash}) of the copy in a folder; None if there is none.

    Raises UserError if it is damaged.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(inputs.whole(path, inputs.RECORD))
        version, files = str(data["version"]), dict(data["files"])
        valid = data["manifest"] == 1 and all(
            isinstance(files[name], str) and is_inside(name) for name in files
        )
        valid = valid and MANIFEST not in files
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(
            f"{path} is not what `fsdp2 install` wrote; move {folder} away and install again"
        )
    return version, files


def _record(hashes: Mapping[str, str]) -> bytes:
    return (
        json.dumps({"manifest": 1, "version": __version__, "files": dict(hashes)}, indent=1) + "\n"
    ).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]  # enough to detect an edit


def _hash(path: Path) -> str | None:
    """The hash of a file; None if it does not exist.

    A link was never installed, whatever its target.
    """
    if path.is_symlink():
        return "a link"
    data = _content(path)
    return None if data is None else _digest(data)


def _content(path: Path) -> bytes | None:
    try:
        return inputs.whole(path, inputs.WHOLE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
