"""Where the base branch of a pull request lies, and what of the policy a pull request changes."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from ..config.policy import Checkouts
from ..config.verify_file import NAME, PYPROJECT, TABLE
from ..errors import UserError
from ..finding import Remark
from ..isolation.leftovers import remove, temporary

KINDS = ("*.py", "*.yaml", "*.yml", "*.toml", "*.json")  # what may hold a part of a policy
SUPPRESSION = "fsdp2: *ignore"


@contextmanager
def base_branch(policy: str | None, folder: Path) -> Iterator[Checkouts | None]:
    """The base branch that `--policy` names: a git ref, which is read into a temporary folder, a
    checkout of it, or its configuration. `folder`: that of the pull request's configuration.

    Raises UserError if there is no such thing.
    """
    if policy is None:
        yield None
        return
    top = _git("rev-parse", "--show-toplevel")
    # first, since a pull request can add a folder of that name, but no ref
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{policy}^{{commit}}")
    if top is None or commit is None:
        yield _checkouts(policy, folder)
        return
    work = temporary("policy")
    try:
        _write(commit, Path(top), work)
        yield Checkouts(Path(top).resolve(), work / "files")
    finally:
        remove(work)


def _checkouts(policy: str, folder: Path) -> Checkouts:
    given = Path(policy)
    if given.is_file():
        found = Checkouts(folder.resolve(), given.resolve().parent, given)
    else:
        found = Checkouts(Path.cwd(), given.resolve())
    if not given.exists():
        raise UserError(
            f"--policy {policy}: no such file or folder, and git has no such commit here (a"
            " shallow clone has no other branch: `git fetch --depth=1 origin"
            " main:refs/remotes/origin/main`)"
        )
    if found.own == found.base:
        raise UserError(f"--policy {policy}: this is the pull request itself, not its base branch")
    return found


def _write(commit: str, top: Path, work: Path) -> None:
    """Write the files of a commit that may hold a part of a policy below `work`/files."""
    (files := work / "files").mkdir()
    index = {"GIT_INDEX_FILE": str(work / "index")}  # not that of the user
    read = _git("read-tree", commit, cwd=top, more=index)
    names = _git("ls-files", "-z", "--", *KINDS, cwd=top, more=index)
    write = ("checkout-index", "-z", "--stdin", f"--prefix={files}/")
    if read is None or names is None or _git(*write, cwd=top, more=index, given=names) is None:
        raise UserError(f"--policy: git could not write the files of {commit}")


def _git(
    *words: str,
    cwd: Path | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
    given: str = "",
) -> str | None:
    """What git prints; None where it is not there or fails."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=cwd,
            env={**os.environ, **more},
            input=os.fsencode(given),
            capture_output=True,
            timeout=120,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).removesuffix("\n")


def changed_policy(folder: Path, *more: Path | None) -> tuple[Remark, ...]:
    """In a pull request of GitHub: that the configuration of a folder, `more` files of a policy, or
    suppressions are not those of the base branch, where git can see it here.
    """
    branch = os.environ.get("GITHUB_BASE_REF")
    ref = f"origin/{branch}"
    if not branch or _git("rev-parse", "--verify", "--quiet", ref) is None:
        return ()
    before = _git("merge-base", ref, "HEAD") or ref
    files = [folder / NAME, folder / PYPROJECT, *filter(None, more)]
    # git refuses a path outside of its repository
    own = [str(f) for f in files if Path(os.path.abspath(f)).is_relative_to(Path.cwd())]  # noqa: PTH100
    differs = _git("diff", "--name-only", "--relative", before, "--", *own) if own else ""
    names = [name for name in (differs or "").splitlines() if not _same_table(name, before)]
    if _git("diff", "--name-only", f"-G{SUPPRESSION}", before, "--", "*.py"):
        names.append("comments `# fsdp2: ignore`")
    if not names:
        return ()
    said = f"{', '.join(names)}: not as on the base branch, and used as here"
    return (Remark(f"{said}; `--policy {ref}` takes what the base branch has"),)


def _same_table(file: str, commit: str) -> bool:
    """Whether a file is a pyproject.toml that has the same configuration in both."""
    if Path(file).name != PYPROJECT:
        return False
    own = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else ""
    texts = own, _git("show", f"{commit}:./{file}") or ""
    first, second = (tomllib.loads(text).get(TABLE[0], {}).get(TABLE[1]) for text in texts)
    return bool(first == second)
