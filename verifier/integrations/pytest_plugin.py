"""A pytest plugin: `pytest --fsdp2 train.py` makes each rule a test, `train.py::RULE`;
`fsdp2_verify` is a fixture for one's own tests.

The runs are made once, when the first of a target's tests begins, and only those that the selected
rules need. The workers of pytest-xdist share them. Without `--fsdp2` nothing of the verifier is
imported.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..config.flags import FLAGS

_FLAGS = tuple(name for name in FLAGS if name not in ("module", "thorough", "oversubscribe"))
_SHARED = "fsdp2_shared"
_REQUIRE = "require-"  # before the name of a part, in the names of items

Result = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; those of `fsdp2 verify` have the same names here, after `--fsdp2-`."""
    group = parser.getgroup("fsdp2", "verified-fsdp2")
    target = (
        "verify this FSDP2 script, or folder with a verify.yaml: a test for each rule (repeatable)"
    )
    group.addoption("--fsdp2", metavar="TARGET", action="append", default=[], help=target)
    for name in _FLAGS:
        option = f"--{name.replace('_', '-')}"
        group.addoption(f"--fsdp2-{option[2:]}", metavar="X", help=f"as `fsdp2 verify {option} X`")
    group.addoption("--fsdp2-args", metavar="X", help="the script's own arguments")
    tiers, outcome = (
        ("static", "simulate", "ranks"),
        "the outcome of a rule that could not be checked (default: fail)",
    )
    group.addoption(
        "--fsdp2-tier", choices=tiers, default="ranks", help="as `fsdp2 verify --tier X`"
    )
    group.addoption("--fsdp2-inconclusive", choices=("fail", "skip"), default="fail", help=outcome)


def pytest_configure(config: pytest.Config) -> None:
    """Register the rest of this plugin for a session with `--fsdp2`."""
    if config.getoption("fsdp2"):
        config.pluginmanager.register(Targets(config), "fsdp2-targets")


class Targets:
    """The targets of one session, and the result of each."""

    def __init__(self, config: pytest.Config) -> None:
        from ..config.target import resolve
        from ..errors import UserError
        from ..rules.naming import unknown

        self.config = config
        flags = {name: config.getoption(f"fsdp2_{name}") for name in (*_FLAGS, "args")}
        self.targets: dict[Path, Any] = {}
        self.found: dict[Path, Result] = {}
        self.shared: Path | None = None
        for given in config.getoption("fsdp2"):
            try:
                target = resolve(Path(given), flags, unknown_rule=unknown)
            except UserError as error:
                raise pytest.UsageError(f"--fsdp2 {given}: {error}") from None
            own = Path(given, "verify.yaml").absolute()
            self.targets[own if own.is_file() else target.script] = target
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args[:] = []
        named = {Path(word.partition("::")[0]).resolve() for word in config.args}
        config.args += [str(file) for file in self.targets if file.resolve() not in named]

    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """A target's file; a `.py` file among the arguments of the session comes through the hook
        below.
        """
        python = file_path.suffix == ".py" and parent.session.isinitpath(file_path)
        return self._collector(file_path, parent) if not python else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """Collect a training script instead of importing it as a module of tests."""
        return self._collector(module_path, parent)

    def _collector(self, file: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return (
            TargetFile.from_parent(parent, path=file, targets=self)
            if file in self.targets
            else None
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Called by pytest-xdist before a worker starts: give all workers one folder."""
        if self.shared is None:
            self.shared = Path(tempfile.mkdtemp(prefix="fsdp2-pytest-"))
        node.workerinput[_SHARED] = str(self.shared)

    def pytest_unconfigure(self) -> None:
        """Remove the workers' folder."""
        if self.shared is not None:
            shutil.rmtree(self.shared, ignore_errors=True)

    def result(self, file: Path, session: pytest.Session) -> Result:
        """The result of a target: {"findings": {rule: finding}} or {"refused" or "wrong":
        reason}.
        """
        if file not in self.found:
            names = [
                item.name
                for item in session.items
                if isinstance(item, RuleItem) and item.path == file and not item.part
            ]
            folder = getattr(self.config, "workerinput", {}).get(_SHARED)
            self.found[file] = (
                self._verify(file, names)
                if folder is None
                else self._once(Path(folder), file, names)
            )
        return self.found[file]

    def _once(self, folder: Path, file: Path, names: list[str]) -> Result:
        """`_verify` in the first worker; the others wait for its result."""
        import fcntl

        result = folder / hashlib.sha256(str(file).encode()).hexdigest()
        with result.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                result.write_text(json.dumps(self._verify(file, names)), encoding="utf-8")
            found: Result = json.loads(result.read_text(encoding="utf-8"))
        return found

    def _verify(self, file: Path, names: list[str]) -> Result:
        from ..errors import UserError
        from ..judging.all_findings import REQUIRED
        from ..report.json_report import as_dict
        from ..report.limits_text import limits
        from ..report.secrets import redact_secrets
        from ..report.text import why_skipped

        try:
            verdict = _verdict(self.targets[file], names, self.config.getoption("fsdp2_tier"))
        except UserError as error:
            return {"wrong": redact_secrets(str(error))}
        if verdict.refused:
            return {"refused": f"environment error: {verdict.refused}"}
        findings: dict[str, Result] = {}
        for item in as_dict(verdict)["findings"]:  # the static tier may have several of one rule
            name = f"{_REQUIRE}{item['part']}" if item["rule"] == REQUIRED else item["rule"]
            findings.setdefault(name, item)
        return {
            "unchecked": verdict.partial if verdict.verdict == "inconclusive" else "",
            "limits": limits(verdict),
            "findings": findings,
            "skipped": {item["rule"]: why_skipped(item) for item in verdict.skipped},
        }


class TargetFile(pytest.File):
    """A target: its items are the rules."""

    def __init__(self, targets: Targets, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.targets = targets

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each rule that the tier judges, and for each part that a run must do."""
        from ..pipeline import select

        tier = self.config.getoption("fsdp2_tier")
        parts = self.targets.targets[self.path].policy.require if tier == "ranks" else ()
        for name in (*select((), (), tier), *(f"{_REQUIRE}{part}" for part in parts)):
            yield RuleItem.from_parent(self, name=name, targets=self.targets)


class RuleItem(pytest.Item):
    """One rule on one target, or one part of the training that it requires."""

    def __init__(self, targets: Targets, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.targets = targets

    @property
    def part(self) -> bool:
        """Whether this is a part that a run must do, and no rule."""
        return self.name.startswith(_REQUIRE)

    def runtest(self) -> None:
        """Pass, skip, or fail with the finding."""
        from ..report.baseline import finding_of
        from ..report.sanitize import sanitize
        from ..report.text import failure

        result = self.targets.result(self.path, self.session)
        if "wrong" in result:
            raise Failed(result["wrong"])
        if "refused" in result:
            self._not_checked(result["refused"])
            return
        if self.name in result["skipped"]:
            pytest.skip(sanitize(result["skipped"][self.name]))
        if self.name not in result["findings"]:  # without a run nothing passes
            if result["unchecked"]:
                self._not_checked(sanitize(result["unchecked"]))
            if self.part:
                return  # a run did it
            pytest.skip(sanitize(f"no finding in {result['limits']}"))
        finding = finding_of(result["findings"][self.name])
        numbers = {"measured": finding.measured, "limit": finding.limit}
        self.user_properties += [
            (name, value) for name, value in numbers.items() if value is not None
        ]
        if finding.status in ("not_applicable", "not_covered"):
            pytest.skip(sanitize(f"{finding.status.replace('_', ' ')}: {finding.evidence}"))
        if finding.status == "pass":
            self.add_report_section("call", "fsdp2", sanitize(finding.evidence))
        elif finding.status == "inconclusive":
            self._not_checked(sanitize(finding.evidence), finding.required)
        elif finding.warns:
            self.add_report_section(
                "call", "fsdp2", sanitize("\n".join(failure(finding, "WARNING")))
            )
        else:
            word = (
                "a consequence of the failure of another rule:" if finding.consequence else "FAIL"
            )
            raise Failed(sanitize("\n".join(failure(finding, word))))

    def _not_checked(self, reason: str, required: bool = True) -> None:
        if not required or self.config.getoption("fsdp2_inconclusive") == "skip":
            pytest.skip(f"not checked: {reason}")
        raise Failed(f"not checked: {reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The finding without frames of this plugin."""
        return (
            str(excinfo.value)
            if isinstance(excinfo.value, Failed)
            else super().repr_failure(excinfo, style)
        )

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The name in headings."""
        return self.path, None, f"{self.path.name}::{self.name}"


class Failed(Exception):
    """A finding that did not pass, as text."""


@dataclass(frozen=True)
class Report:
    """`verdict` is "pass", "fail", "inconclusive", "error" or "no_findings"; `text`: the report;
    `findings`, `data`: of the JSON report.
    """

    verdict: str
    text: str
    findings: list[Result]
    data: Result


@pytest.fixture
def fsdp2_verify() -> Callable[..., Report]:
    """`fsdp2_verify("train.py", nproc=2, args=["--small"], only=["optimizer"])`; further options as
    those of `fsdp2 verify`.
    """

    def run(
        target: str | Path, *, only: Any = (), skip: Any = (), tier: str = "ranks", **flags: Any
    ) -> Report:
        from ..config.target import resolve
        from ..pipeline import select
        from ..report import RENDERERS
        from ..report.json_report import as_dict
        from ..rules.naming import unknown as unknown_rule

        if unknown := set(flags) - {*_FLAGS, "args", "oversubscribe", "thorough"}:
            raise TypeError(f"fsdp2_verify has no option {', '.join(sorted(unknown))}")
        words = {name: _line(value) if name != "args" else value for name, value in flags.items()}
        verdict = _verdict(
            resolve(Path(target), words, unknown_rule=unknown_rule), select(only, skip, tier), tier
        )
        data = as_dict(verdict)
        return Report(verdict.verdict, RENDERERS["text"](verdict), data["findings"], data)

    return run


def _line(value: Any) -> Any:
    return shlex.join(map(str, value)) if isinstance(value, list | tuple) else value


def _verdict(target: Any, names: list[str], tier: str) -> Any:
    """`verify` in a temporary folder."""
    from ..isolation.leftovers import remove, temporary
    from ..pipeline import verify

    work = temporary("pytest")
    try:
        return verify(target, work, names, tier=tier)
    finally:
        remove(work)
