"""Verifications of a right script on machines that lack something, or are odd in some other way.

    python benchmarks/isolation/surroundings.py --fsdp2 "python /path/to/skill" [--only NAME]

In each of the surroundings the exit code, what is printed, the mechanism of isolation and the time
must be as expected; the user's files must be as before, TMPDIR empty and no process left. Runs as
root, in a mount namespace of its own; some trials run as the user `tester` (--user), who must be
able to read the interpreter of --fsdp2. A limit of namespaces holds for one trial alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acts import OLD, Place
from digest import differences, tree
from surroundings_cases import CASES, FURTHER_GROUP, Case, Setting, Skip, called
from trial import Tool, arguments, environment, leftovers, reported, survivors, tool

HERE = Path(__file__).resolve().parent
ZOO = HERE.parents[1] / "tests" / "zoo"
OWN_NAMESPACE = "FSDP2_SURROUNDINGS_NAMESPACE"
NEVER = re.compile(r"Traceback \(most recent|a fault of fsdp2 itself|fsdp2 itself failed")
FORBID = '''\
"""Run a command where user namespaces, seccomp or both are refused: forbid.py WHAT COMMAND..."""
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
what, command = sys.argv[1], sys.argv[2:]
if "namespaces" in what:  # a limit of a new namespace, in which all users are who they were
    ready, begin = os.pipe(), os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        os.read(begin[0], 1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{parent}/{name}", "w") as file:
                file.write("0 0 4294967295")
        os.write(ready[1], b"x")
        os._exit(0)
    assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
    os.write(begin[1], b"x")
    os.read(ready[0], 1)
    os.wait()
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
if "seccomp" in what:  # seccomp(2) and prctl(PR_SET_SECCOMP) fail
    call, control = {"x86_64": (317, 157), "aarch64": (277, 167)}[os.uname().machine]
    lines = [(0x20, 0, 0, 0), (0x15, 4, 0, call), (0x15, 0, 2, control), (0x20, 0, 0, 16)]
    lines += [(0x15, 1, 0, 22), (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50000 | 38)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in lines))
    about = struct.pack("HP", len(lines), ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, about) == 0
os.execvp(command[0], command)
'''


@dataclass(frozen=True)
class Folders(Place):
    """The folders of one trial; one of them may have a long path."""

    long: str = ""

    def _long(self, path: Path, name: str) -> Path:
        if self.long != name:
            return path
        return path / ("a" * 150) / ("b" * (300 - len(str(path)) - 152))

    @property
    def project(self) -> Path:
        return self._long(super().project, "project")

    @property
    def tmp(self) -> Path:
        return self._long(super().tmp, "tmp")


@contextlib.contextmanager
def prepared(tool: Tool, case: Case, user: pwd.struct_passwd) -> Iterator[Folders]:
    """The folders of a trial, with a project in them; removed at the end."""
    base = Path(tempfile.mkdtemp(prefix="surroundings-", dir=tool.folder)).resolve()
    base.chmod(0o755)
    place = Folders(base, case.long)
    mounted = [place.project]
    try:
        for folder in (place.project, place.home, place.reports, place.tmp):
            folder.mkdir(parents=True)
        for name, options in case.disks:
            mounted.append(getattr(place, name))
            called("mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted[-1])
        fill(place, case)
        if case.as_user:
            for above, folders, files in os.walk(base):
                for path in (above, *(f"{above}/{name}" for name in (*folders, *files))):
                    os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
        case.change(Setting(place, user))
        for above, folders, files in os.walk(place.project):
            for name in (*folders, *files):
                if not Path(above, name).is_symlink() and os.access(above, os.W_OK):
                    os.utime(f"{above}/{name}", (OLD, OLD))
        yield place
    finally:
        for folder in mounted:
            unmount = ["umount", "--lazy", folder]
            while subprocess.run(unmount, capture_output=True, check=False).returncode == 0:
                continue
        shutil.rmtree(base, ignore_errors=True)


def fill(place: Place, case: Case) -> None:
    """A project: the script, data, and outputs of an earlier training."""
    source = (ZOO / case.script).read_text(encoding="utf-8")
    begin = 'if __name__ == "__main__":\n'
    assert begin in source
    source = source.replace(begin, f"{case.first}\n{begin}" if case.first else begin)
    project = place.project
    (project / "train.py").write_text(source, encoding="utf-8")
    (project / "slow.py").write_text("import time\n\ntime.sleep(60)\n", encoding="ascii")
    (project / "runs" / "latest" / "nested").mkdir(parents=True)
    (project / "runs" / "latest" / "model.bin").write_bytes(bytes(range(256)) * 64)
    (project / "runs" / "latest" / "nested" / "a.txt").write_text("a", encoding="ascii")
    (project / "runs" / "link").symlink_to("latest/model.bin")
    (place.home / ".profile").write_text("# of the user\n", encoding="ascii")
    (place.reports / "forbid.py").write_text(FORBID, encoding="ascii")


def command_of(tool: Tool, case: Case, place: Place, user: pwd.struct_passwd) -> list[str]:
    """The command line of a trial: wrappers, the user, a shell with limits, fsdp2."""
    report = f"json={place.reports}/report.json"
    target = case.target.replace("{project}", str(place.project))
    verify = ["verify", target, *case.options, "--isolation", tool.isolation]
    own = list(case.command) or [*verify, "--report", "text", "--report", report]
    if tool.isolation == "none":
        own = [word for word in own if word not in ("--isolation", "none")]
    forbid = (sys.executable, str(place.reports / "forbid.py"))
    wrap = [word for one in case.wrap for word in (forbid if one == "{forbid}" else (one,))]
    groups = f"--groups={user.pw_gid},{FURTHER_GROUP}"
    ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", groups)
    as_user = ["setpriv", *ids] if case.as_user else []
    return [*wrap, *as_user, "bash", "-c", case.shell, "surroundings", *tool.command, *own]


def tried(tool: Tool, case: Case, user: pwd.struct_passwd) -> dict[str, Any]:
    """One verification in these surroundings: what came of it, and what is not as expected."""
    row: dict[str, Any] = {"name": case.name, "what": case.what}
    mark = uuid.uuid4().hex
    try:
        with prepared(tool, case, user) as place:
            command = command_of(tool, case, place, user)
            own = {name: value.format(base=place.base) for name, value in case.environment.items()}
            variables = {**environment(place, mark), "USER": "root", **own}
            if case.as_user:
                variables["USER"] = user.pw_name
            roots = {"project": place.project, "work": place.base / "work", "home": place.home}
            before = tree(roots)
            with tool.locked():
                row |= run(command, place, variables, 3 * case.limit)
                row["processes"] = survivors(mark, place)
            changes = differences(before, tree(roots))
            row["differs"] = [f"{one.what}: {one.path}" for one in changes]
            row["tmp"] = leftovers(place)
            report = reported([f"json={place.reports}/report.json"])
    except Skip as reason:
        return {**row, "skipped": str(reason), "wrong": []}
    row["verdict"] = str(report.get("verdict", "-"))
    row["isolation"] = str(report.get("environment", {}).get("isolation", "-"))
    failed = [one for one in report.get("findings", []) if one.get("status") == "fail"]
    row["failed"] = [str(one.get("rule")) for one in failed]
    return {**row, "wrong": wrong(row, case, tool.isolation)}


def run(
    command: list[str],
    place: Place,
    variables: dict[str, str],
    limit: float,
) -> dict[str, Any]:
    """The command to its end; it prints to a file."""
    began, printed = time.monotonic(), place.reports / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=place.project,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        if code is None:
            process.kill()
            process.wait()
    text = printed.read_bytes()[-20_000:].decode("utf-8", "replace")
    return {"code": code, "seconds": round(time.monotonic() - began, 1), "printed": text}


def wrong(row: dict[str, Any], case: Case, isolation: str) -> list[str]:
    """What is not as expected."""
    codes = case.copy_codes if case.copy_codes and isolation == "copy" else case.codes
    printed, found = row["printed"], []
    if row["code"] not in codes:
        found.append(f"exit {row['code']}, not {' or '.join(map(str, codes))}")
    if row["code"] == 0 and not case.command and row["verdict"] != "pass":
        found.append(f"verdict {row['verdict']}")
    if row["code"] not in (0, None):
        missing = [word for word in case.words if not re.search(word, printed, re.IGNORECASE)]
        found += [f"says nothing of {word}" for word in missing]
    if isolation != "copy" and not re.search(case.says, printed):
        found.append(f"does not say {case.says}")
    if shown := NEVER.search(printed):
        found.append(f"prints {shown[0]!r}")
    reported_one = row["isolation"] != "-"
    if isolation == "auto" and reported_one and not re.search(case.isolation, row["isolation"]):
        found.append(f"isolation is {row['isolation']}")
    if row["seconds"] > case.limit:
        found.append(f"took {row['seconds']:.0f} s, more than {case.limit:.0f}")
    for name, what in (("differs", "files"), ("tmp", "left in TMPDIR"), ("processes", "processes")):
        if row[name]:
            found.append(f"{what}: {', '.join(row[name][:3])}")
    return found


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "skipped" in row:
        return f"{row['name']:<20} skipped: {row['skipped']}"
    what = f"{row['code']!s:>4} {row['verdict'][:12]:<12} {row['isolation'].split(' ')[0]:<8}"
    result = "as expected" if not row["wrong"] else f"WRONG: {'; '.join(row['wrong'])}"
    return f"{row['name']:<20} {row['seconds']:>6.1f} {what} {result}"


def chosen(only: list[str]) -> tuple[Case, ...]:
    unknown = [name for name in only if not any(case.name.startswith(name) for case in CASES)]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; {', '.join(one.name for one in CASES)}")
    return tuple(one for one in CASES if not only or one.name.startswith(tuple(only)))


def main() -> int:
    parser = arguments(__doc__)
    parser.set_defaults(isolation="auto")
    parser.add_argument("--only", action="append", default=[], help="begin of a name (repeatable)")
    parser.add_argument("--user", default="tester", help="the one for trials that are not root's")
    parser.add_argument("--verbose", action="store_true", help="show what is printed where wrong")
    given: argparse.Namespace = parser.parse_args()
    if os.geteuid():
        raise SystemExit("only root can make these surroundings")
    if OWN_NAMESPACE not in os.environ:
        os.environ[OWN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    wanted, measured = chosen(given.only), tool(given)
    measured = replace(measured, folder=measured.folder.resolve())
    user, rows = pwd.getpwnam(given.user), []
    print(f"{'surroundings':<20} {'s':>6} exit verdict      isolation", flush=True)
    for case in wanted:
        rows.append(tried(measured, case, user))
        print(line(rows[-1]), flush=True)
        if given.verbose and rows[-1]["wrong"]:
            print(f"    {case.what}\n    {rows[-1]['printed'][-3000:]}", flush=True)
    if given.out:
        results = {"isolation": measured.isolation, "rows": rows}
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
