"""The surroundings in which `surroundings.py` verifies a script, and what is expected there."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acts import Place
from trial import OWN_CACHE

FURTHER_GROUP = 100  # of the user, beside the first one
PLAIN = ("--quick", "--steps", "3")
SAVES = (
    *("--quick", "--steps", "4", "--save-args", "--save-every 2 --out {checkpoint}"),
    *("--resume-args", "--resume {checkpoint}"),
)


class Skip(Exception):
    """These surroundings cannot be had on this machine."""


@dataclass(frozen=True)
class Setting:
    """What a trial works with: the folders, and the user for trials without privileges."""

    place: Place
    user: pwd.struct_passwd


@dataclass(frozen=True)
class Case:
    """Surroundings, and what is expected in them."""

    name: str
    what: str
    codes: tuple[int, ...] = (0,)
    copy_codes: tuple[int, ...] = ()  # with --isolation copy, if others
    words: tuple[str, ...] = ()  # patterns in what is printed, where the exit code is not 0
    says: str = ""  # a pattern in what is printed, always
    isolation: str = ""  # a pattern of the mechanism, for --isolation auto
    limit: float = 60.0  # seconds
    script: str = "checkpoint_stateful.py"
    first: str = ""  # lines that the script does at first
    options: tuple[str, ...] = SAVES
    target: str = "train.py"
    command: tuple[str, ...] = ()  # of fsdp2, instead of `verify`
    shell: str = 'exec "$@"'
    wrap: tuple[str, ...] = ()  # {forbid}: the wrapper above
    as_user: bool = False
    disks: tuple[tuple[str, str], ...] = ()  # (a folder of the trial, options of a tmpfs there)
    change: Callable[[Setting], None] = lambda setting: None
    environment: dict[str, str] = field(default_factory=dict)
    long: str = ""  # "project" or "tmp": the one with a long path


def in_rank_0(*lines: str) -> str:
    """Lines for one rank of each run."""
    indented = "".join(f"    {line}\n" for line in lines)
    return f'import os, shutil, subprocess\nif os.environ["RANK"] == "0":\n{indented}'


def by_mount(setting: Setting) -> None:
    project = setting.place.project
    called("mount", "--bind", project, project)
    called("mount", "-o", "remount,ro,bind", project)


def without_writing(setting: Setting) -> None:
    for folder, _, files in os.walk(setting.place.project, topdown=False):
        for path in (*(Path(folder, name) for name in files), Path(folder)):
            path.chmod(path.stat().st_mode & 0o555)


def of_root_and_group(setting: Setting) -> None:
    """The project is root's; the user's group may write to all of it."""
    for place, _, files in os.walk(setting.place.project.parent):
        for path in (Path(place), *(Path(place, name) for name in files)):
            os.chown(path, 0, setting.user.pw_gid)
            path.chmod(0o664 if path.is_file() else 0o2775)


def of_further_group(setting: Setting) -> None:
    """All is the user's, but its group is one that is not the user's first."""
    _give_to_further_group(setting.place.base)


def of_further_group_again(setting: Setting) -> None:
    """The same, and TMPDIR has the folder of torch that an earlier verification has left."""
    cache = setting.place.tmp / f"{OWN_CACHE}_{setting.user.pw_name}"
    cache.mkdir()
    os.chown(cache, setting.user.pw_uid, setting.user.pw_gid)
    of_further_group(setting)


def of_further_group_alone(setting: Setting) -> None:
    """The project alone has another group, as a folder that a team shares."""
    _give_to_further_group(setting.place.project)
    setting.place.project.chmod(0o2775)


def _give_to_further_group(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for path in (place, *(f"{place}/{name}" for name in files)):
            os.chown(path, -1, FURTHER_GROUP, follow_symlinks=False)


def with_files_of_root(setting: Setting) -> None:
    project = setting.place.project
    for path, mode in (("theirs.txt", 0o644), ("shared.txt", 0o666), ("secret.txt", 0o600)):
        (project / path).write_text("of another user", encoding="ascii")
        (project / path).chmod(mode)
    for folder, mode in (("theirs", 0o755), ("hidden", 0o700)):
        (project / folder).mkdir()
        (project / folder / "inner.txt").write_text("inner", encoding="ascii")
        (project / folder).chmod(mode)


def turkish(setting: Setting) -> None:
    target = setting.place.base / "locale" / "tr_TR.UTF-8"
    target.parent.mkdir()
    made = subprocess.run(["localedef", "-i", "tr_TR", "-f", "UTF-8", target], capture_output=True)
    if not target.exists():
        raise Skip(f"localedef makes no tr_TR.UTF-8: {made.stderr.decode()[:100]}")


def called(*command: Any) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"{command[0]}: {done.stderr.strip()[:100]}")


NO_SPACE = (r"TMPDIR", r"space", r"\bneeds?\b", r"\bfree\b")
NO_PROCESS = (r"process|thread|ulimit|Resource temporarily unavailable",)
BOUND = ("setpriv", "--bounding-set=-sys_admin")
THREADS = """\
import threading, time
def work(number):
    while True:
        with open(f"{os.environ['RANK']}-{number}.tmp", "w") as file:
            file.write("x")
        time.sleep(0.2)
for number in range(100):
    threading.Thread(target=work, args=(number,), daemon=True).start()
"""
OUTPUT = "import sys\nfor _ in range(512):\n    sys.stdout.write(('x' * 1023 + chr(10)) * 1024)\n"
RENAMES = in_rank_0(
    'if os.path.exists("runs/latest/nested"):  # a resumed run finds it renamed',
    '    os.rename("runs/latest", "runs/previous")',
    '    assert not os.path.exists("runs/latest")',
    'assert os.path.exists("runs/previous/nested/a.txt")',
    'import pathlib; pathlib.Path("runs/third").mkdir(exist_ok=True)',
    'pathlib.Path("runs/third").replace("runs/fourth")',
)
MAKES = in_rank_0(
    'open("runs/new.txt", "w").write("new")',
    'os.makedirs("made", exist_ok=True)',
)
MOVES = in_rank_0(
    'if os.path.exists("runs/latest"):',
    '    subprocess.run(["mv", "runs/latest", "runs/previous"], check=True)',
)
APPENDS = 'open("{}", "a").write("more")'
CASES = (
    Case("plain", "nothing is odd"),
    Case("files-64", "ulimit -Sn 64", shell='ulimit -Sn 64; exec "$@"'),
    *(
        Case(
            *(f"processes-{most}", f"ulimit -u {most}, not root", (0, 4), (), NO_PROCESS),
            shell=f'ulimit -u {most}; exec "$@"',
            as_user=True,
        )
        for most in (25, 20, 12, 8, 5)
    ),
    *(
        Case(
            *(f"memory-{most}mb", f"ulimit -v {most}000", (0, 2, 4), (), (r"memory",)),
            shell=f'ulimit -v {most}000; exec "$@"',
        )
        for most in (2000, 1000, 700, 500)
    ),
    Case(
        *("no-network", "no network, loopback down", (4,), (), (r"no sockets",)),
        wrap=("unshare", "--net"),
    ),
    Case(
        *("output-1gb", "1 GiB on stdout in each run"),
        script="mlp_regression.py",
        first=OUTPUT,
        options=PLAIN,
        limit=120,
    ),
    Case(
        *("output-1gb-40mb", "the same, with 40 MB in TMPDIR"),
        script="mlp_regression.py",
        first=OUTPUT,
        options=PLAIN,
        limit=120,
        disks=(("tmp", "size=40m"),),
    ),
    Case(
        *("threads-100", "100 threads per rank that write"),
        first=f"import os\n{THREADS}",
        limit=120,
    ),
    Case(
        *("slow-import", "an import of 60 s"),
        script="mlp_regression.py",
        first="import slow\n",
        options=PLAIN,
        limit=330,
    ),
    Case("stdout-closed", ">&-", shell='exec "$@" >&-'),
    Case("outputs-closed", ">&- 2>&-", shell='exec "$@" >&- 2>&-'),
    Case("all-closed", "<&- >&- 2>&-", shell='exec "$@" <&- >&- 2>&-'),
    Case(
        *("broken-pipe", "| head -c 1"),
        shell='"$@" | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}',
    ),
    Case("long-path", "a project path of 300 characters", long="project"),
    Case("long-tmpdir", "a TMPDIR of 300 characters", long="tmp"),
    Case(
        *("turkish", "LC_ALL=tr_TR.UTF-8"),
        change=turkish,
        environment={"LC_ALL": "tr_TR.UTF-8", "LOCPATH": "{base}/locale"},
    ),
    Case(
        *("user-doctor", "not root: doctor"),
        command=("doctor",),
        says=r"isolation\s+overlay",
        as_user=True,
    ),
    Case("user-plain", "not root", isolation="^overlay", as_user=True),
    Case(
        *("user-cwd-slash", "not root, from /"),
        isolation="^(overlay|copy)",
        shell='cd /; exec "$@"',
        target="{project}/train.py",
        as_user=True,
    ),
    Case("user-rename", "not root: os.rename of folders", first=RENAMES, as_user=True),
    Case(
        *("user-mv", "not root: mv of a folder"),
        first=MOVES,
        as_user=True,
    ),
    Case(
        *("user-group-reads", "root's project, group may write: new files"),
        first=MAKES,
        change=of_root_and_group,
        as_user=True,
    ),
    Case(
        *("user-other-group", "project and home with a further group of the user"),
        first=MAKES,
        change=of_further_group,
        as_user=True,
    ),
    Case(
        *("user-other-group-2", "the same, after another verification"),
        first=MAKES,
        change=of_further_group_again,
        as_user=True,
    ),
    Case(
        *("user-other-group-3", "the project alone, old files written"),
        codes=(0, 4),
        copy_codes=(0,),
        words=(r"--isolation copy",),
        first=in_rank_0(APPENDS.format("runs/latest/model.bin")),
        change=of_further_group_alone,
        as_user=True,
    ),
    Case(
        *("user-other-group-4", "the project alone, new files"),
        first=MAKES,
        change=of_further_group_alone,
        as_user=True,
    ),
    Case(
        *("user-group-writes", "root's project, group may write: old files"),
        codes=(0, 4),
        copy_codes=(0,),
        words=(r"--isolation copy",),
        first=in_rank_0(APPENDS.format("runs/latest/model.bin")),
        change=of_root_and_group,
        as_user=True,
    ),
    Case(
        *("user-foreign-reads", "files of root in the project: read"),
        first=in_rank_0('open("theirs.txt").read()', 'open("theirs/inner.txt").read()'),
        change=with_files_of_root,
        as_user=True,
    ),
    Case(
        *("user-foreign-writes", "files of root in the project: written"),
        codes=(0, 4),
        copy_codes=(0,),
        words=(r"--isolation copy",),
        first=in_rank_0(APPENDS.format("shared.txt")),
        change=with_files_of_root,
        as_user=True,
    ),
    Case("read-only-mount", "the project is mounted ro", change=by_mount),
    Case("user-read-only", "chmod a-w, not root", change=without_writing, as_user=True),
    Case("tmpfs-project", "tmpfs project, ext4 TMPDIR", disks=(("project", "size=64m"),)),
    Case(
        *("user-tmpfs-project", "the same, not root"),
        disks=(("project", "size=64m"),),
        as_user=True,
    ),
    Case("tmpfs-tmpdir", "ext4 project, tmpfs TMPDIR", disks=(("tmp", "size=1g"),)),
    Case(
        *("user-tmpfs-tmpdir", "the same, not root"),
        disks=(("tmp", "size=1g"),),
        as_user=True,
    ),
    Case("tmpdir-40mb", "40 MB in TMPDIR", (0, 4), (), NO_SPACE, disks=(("tmp", "size=40m"),)),
    Case(
        *("tmpdir-40mb-full", "40 MB in TMPDIR, a file of 60 MB", (4,), (), NO_SPACE),
        first=in_rank_0('open("runs/big.bin", "wb").write(b"x" * (60 << 20))'),
        disks=(("tmp", "size=40m"),),
    ),
    Case("tmpdir-1mb", "1 MB in TMPDIR", (0, 4), (), NO_SPACE, disks=(("tmp", "size=1m"),)),
    Case(
        *("tmpdir-64kb", "64 KB in TMPDIR", (0, 4), (), NO_SPACE),
        disks=(("tmp", "size=64k"),),
    ),
    Case(
        *("tmpdir-40-files", "40 inodes in TMPDIR", (0, 4), (), NO_SPACE[:2]),
        disks=(("tmp", "nr_inodes=40"),),
    ),
    Case(
        *("user-no-namespaces", "max_user_namespaces=0, not root"),
        isolation=r"^copy \(no overlay: .+\)",
        wrap=("{forbid}", "namespaces"),
        as_user=True,
    ),
    Case(
        *("no-sys-admin", "root without CAP_SYS_ADMIN"),
        isolation=r"^(overlay|copy)",
        wrap=BOUND,
    ),
    Case(
        *("container", "root without CAP_SYS_ADMIN and user namespaces"),
        isolation=r"^copy \(no overlay: .+\)",
        wrap=("{forbid}", "namespaces", *BOUND),
    ),
    Case(
        *("no-seccomp", "no seccomp, but namespaces"),
        copy_codes=(4,),
        words=("--isolation none",),
        isolation="^overlay",
        wrap=("{forbid}", "seccomp"),
    ),
    Case(
        *("nothing", "neither namespaces nor seccomp", (4,), (), (r"--isolation none",)),
        wrap=("{forbid}", "namespaces,seccomp", *BOUND),
    ),
)
