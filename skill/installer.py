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

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..verifier.errors import UserError
from . import copies
from .atomic_write import obstacle, write_files
from .copies.contents import NAME, PACK
from .copies.manifest import MANIFEST, content_of, digest_of, hash_of, read, record_of

_RULES = "references/contract.md"

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
    manifest = read(folder)
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
    record = record_of({path: digest_of(data) for path, data in files.items()})
    if hash_of(folder / MANIFEST) != digest_of(record):
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
    manifest = read(folder)
    if manifest is None:
        return Plan(target, "foreign" if any(folder.iterdir()) else "absent")
    previous, before = manifest
    plan = Plan(target, "uninstall", previous)
    _add_changes(plan, before, {}, force)
    plan.contents |= dict.fromkeys(_all_compiled(folder, plan.removed))
    plan.contents[MANIFEST] = (
        record_of({path: before[path] for path in plan.kept}) if plan.kept else None
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
        data, there = files.get(path), hash_of(folder / path)
        if there == (None if data is None else digest_of(data)) or obstacle(
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
                before = {path: content_of(folder / path) for path in plan.contents}
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


def _changed(folder: Path, files: Mapping[str, bytes], plan: Plan) -> dict[str, list[str]]:
    """What an upgrade to these files changes for its readers."""
    texts = [path for path in (*plan.new, *plan.replaced, *plan.removed) if path.endswith(".md")]
    old, new = _rules(content_of(folder / _RULES)), _rules(files.get(_RULES))
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
