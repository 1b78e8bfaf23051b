"""What runs the gate elsewhere: the action, the workflows, the GitLab job, the hooks.

Their own shell lines are run here.
"""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from documents import DOCUMENTS, blocks
from records import cases
from scripts import python, written
from verified_fsdp2 import __version__
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.cli import main
from verified_fsdp2.skill.spec import load
from verified_fsdp2.verifier.report import RENDERERS

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
GATE = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
SPECS = {path.stem: path for path in (ROOT / "examples").glob("*.yaml")} | {
    path.parent.name: path for path in (ROOT / "examples").glob("*/spec.yaml")
}
FAULT = ROOT / "tests" / "faults" / "optim_before_shard.py"
RIGHT = ROOT / "tests" / "zoo" / "minimal.py"
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def schema(name: str) -> dict[str, Any]:
    """A schema of schemastore.org, as the package check-jsonschema carries it."""
    vendored = resources.files("check_jsonschema.builtin_schemas") / "vendor" / f"{name}.json"
    return json.loads(vendored.read_text(encoding="utf-8"))


def as_github(text: str) -> Any:
    """A workflow as GitHub reads it: `on` is a word there, and true in YAML 1.1."""
    found = yaml.safe_load(text)
    return (
        {"on" if key is True else key: value for key, value in found.items()}
        if isinstance(found, dict)
        else found
    )


def documented(sign: str) -> Iterator[Any]:
    """The YAML blocks of the documents that hold a text, parsed."""
    names = {path.name for path in DOCUMENTS}
    for where, text in blocks("yaml"):
        if where.split(":")[0] in names and sign in text:
            yield as_github(text)


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projects")
    for where in ("github", "gitlab"):
        assert (
            main(
                [
                    "new",
                    str(SPECS["quickstart"]),
                    str(folder / where),
                    "--set",
                    f"verify.ci={where}",
                ]
            )
            == 0
        )
    return {where: folder / where for where in ("github", "gitlab")}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """What an install leaves on the path: `python` and `fsdp2`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("python", ""), ("fsdp2", " -m verified_fsdp2.skill")):
        written(
            folder, f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n', name
        ).chmod(0o755)
    return folder


def shell(script: str, cwd: Path, tools: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run lines as a runner does: `shell: bash` of GitHub, with an environment of its own."""
    kept = {
        name: os.environ[name]
        for name in ("HOME", "PYTHONPATH", "LANG", "TMPDIR")
        if name in os.environ
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    env = {**kept, "PATH": f"{tools}:/usr/bin:/bin", **env}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def step(name: str) -> dict[str, Any]:
    (found,) = [one for one in ACTION["runs"]["steps"] if one.get("name") == name]
    return dict(found)


def filled(values: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """The environment of a step: expressions are inputs of the action, and nothing else."""
    known = {name: about["default"] for name, about in ACTION["inputs"].items()} | inputs
    return {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: known[m[1]], value)
        for key, value in values.items()
    }


def verify_step(
    cwd: Path, tools: Path, **inputs: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run the action's step `Verify`; its result and its outputs."""
    one, output = step("Verify"), cwd / "github-output"
    inputs = {
        "reports": ACTION["inputs"]["reports"]["default"],
        **{k.replace("_", "-"): v for k, v in inputs.items()},
    }
    supported = " ".join(word for word in inputs["reports"].split() if word in RENDERERS)
    env = filled(one["env"], inputs | {"reports": supported})
    more = {
        "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(cwd / "summary"),
        "GITHUB_WORKSPACE": str(cwd),
    }
    done = shell(one["run"], cwd, tools, **env, **more)
    outputs = (
        dict(line.split("=", 1) for line in output.read_text().splitlines())
        if output.exists()
        else {}
    )
    return done, outputs


def test_the_action_is_one() -> None:
    jsonschema.Draft7Validator(schema("github-actions")).validate(ACTION)
    for about in ACTION["inputs"].values():
        assert about["description"].endswith((".", ")", "files.")) and isinstance(
            about["default"], str
        )
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"]), "every input is used, and declared"
    assert set(ACTION["inputs"]["reports"]["default"].split()) >= set(RENDERERS) - {"text"}, (
        "github prints the text"
    )


def workflows(projects: Mapping[str, Path]) -> list[Any]:
    made = (projects["github"] / ".github" / "workflows" / "verify.yml").read_text()
    gate = (ROOT / ".github" / "workflows" / "gate.yml").read_text()
    return [as_github(made), as_github(gate), *documented("runs-on:")]


def test_the_workflows_are_some(projects: dict[str, Path]) -> None:
    found = workflows(projects)
    assert len(found) >= 3, "the scaffold's, this repository's, and one in the documents"
    for one in found:
        jsonschema.Draft7Validator(schema("github-workflows")).validate(one)
        assert one["permissions"]["contents"] == "read"
        for job in one["jobs"].values():
            assert job["timeout-minutes"] <= 60


def test_nothing_reaches_a_shell_but_through_the_environment(projects: dict[str, Path]) -> None:
    steps = [*ACTION["runs"]["steps"]]
    for one in workflows(projects):
        steps += [each for job in one["jobs"].values() for each in job["steps"]]
    assert len(steps) > 12
    for each in steps:
        assert "${{" not in each.get("run", "")
        if "uses" in each and each["uses"] != "./" and not each["uses"].startswith("OWNER/"):
            assert PINNED.fullmatch(each["uses"].split("  ")[0]) or each["uses"].startswith(
                "github/codeql-action/"
            )


@pytest.mark.full
@pytest.mark.launch
def test_the_action_on_the_quickstart(projects: dict[str, Path], tools: Path) -> None:
    project = projects["github"]
    done, outputs = verify_step(project.parent, tools, target="github", folder="out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs == {"verdict": "pass", "folder": "out"}
    assert json.loads((project.parent / "out" / "train.json").read_text())["verdict"] == "pass"
    assert "verdict: pass" in done.stdout
    files = {path.suffix.removeprefix(".") for path in (project.parent / "out").iterdir()}
    ends = {"junit": "xml"}
    assert files == {ends.get(name, name) for name in RENDERERS if name not in ("github", "text")}


@cases("target, code", (RIGHT, 4), (FAULT, 1), (Path("no.py"), 2))
def test_the_action_fails_as_the_command_does(
    tmp_path: Path, tools: Path, target: Path, code: int
) -> None:
    done, outputs = verify_step(tmp_path, tools, target=str(target), tier="static")
    assert (done.returncode, outputs["verdict"]) == (
        code,
        {4: "inconclusive", 1: "fail", 2: "error"}[code],
    )
    if code == 1:
        assert "FAIL optim-before-shard" in done.stdout


def test_an_exit_code_without_a_report_is_no_pass(tmp_path: Path, tools: Path) -> None:
    """As where a `json.py` of the repository ends the command with 0."""
    (tools / "fsdp2").write_text("#!/bin/sh\nexit 0\n")
    for name in ("json", "shlex", "pathlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)\n")
    done, outputs = verify_step(tmp_path, tools, target="train.py", args="--small")
    assert (done.returncode, outputs["verdict"]) == (3, "error")


def test_inputs_become_options(tmp_path: Path, tools: Path) -> None:
    (tools / "fsdp2").write_text("#!/bin/sh\nprintf '[%s]' \"$@\" >&2; exit 4\n")
    inputs = {
        "target": "$(touch injected) a",
        "only_target": "small",
        "config": "c.yaml",
        "nproc": "4",
    }
    inputs |= {
        "only": "parity wrapping",
        "skip": "* clipping",
        "require": "resume,bf16",
        "baseline": "old.json",
        "policy": "origin/main",
        "reports": "text json",
    }
    done, outputs = verify_step(
        tmp_path, tools, **inputs, args="--name 'a b' \"; touch injected\" ''"
    )
    assert (done.returncode, outputs["verdict"]) == (4, "inconclusive")
    words = re.findall(r"\[([^\]]*)\]", done.stderr)
    own = words.index("--name") - 1
    report = words[own - 2 : own]
    assert report[0] == "--report" and re.fullmatch(r"json=/.+/\{target\}\.json", report[1])
    del words[own - 2 : own]
    assert words == [
        *(
            "verify",
            "--tier",
            "ranks",
            "$(touch injected) a",
            "--target",
            "small",
            "--config",
            "c.yaml",
        ),
        *(
            "--nproc",
            "4",
            "--require",
            "resume,bf16",
            "--baseline",
            "old.json",
            "--policy",
            "origin/main",
            "--only",
            "parity",
            "--only",
            "wrapping",
        ),
        *("--skip", "*", "--skip", "clipping"),
        *(
            "--report",
            "text=fsdp2-reports/{target}.txt",
            "--report",
            "json=fsdp2-reports/{target}.json",
        ),
        *("--", "--name", "a b", "; touch injected", ""),
    ]
    assert not (tmp_path / "injected").exists()


def test_the_install_of_the_action(tmp_path: Path, tools: Path) -> None:
    output = tmp_path / "output"
    (tmp_path / "more.txt").write_text("transformers\n")
    here = {
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(output),
        "RUNNER_TEMP": str(tmp_path),
    }
    keys = []
    for requirements in ("", "more.txt"):
        output.unlink(missing_ok=True)
        env = filled(step("What is installed")["env"], {"requirements": requirements})
        done = shell(step("What is installed")["run"], tmp_path, tools, **here, **env)
        assert done.returncode == 0, done.stderr
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        assert outputs["constraints"] == str(ROOT / "constraints.txt") and outputs[
            "cache"
        ].startswith("/")
        keys.append(outputs["key"])
    assert len(set(keys)) == 2 and all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)
    (tools / "python").write_text("#!/bin/sh\nprintf '[%s]' \"$@\"\n")
    env = filled(step("Install")["env"], {"requirements": "more.txt"}) | {
        "CONSTRAINTS": outputs["constraints"]
    }
    done = shell(step("Install")["run"], tmp_path, tools, **here, **env)
    assert re.findall(r"\[([^\]]*)\]", done.stdout) == [
        *("-I", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
        *("--constraint", str(ROOT / "constraints.txt")),
        *(
            "--extra-index-url",
            "https://download.pytorch.org/whl/cpu",
            "--requirement",
            "more.txt",
            str(ROOT),
        ),
    ]


def test_the_gate_names_every_example() -> None:
    job = GATE["jobs"]["examples"]
    assert sorted(job["strategy"]["matrix"]["example"]) == sorted(SPECS)
    (use,) = [each for each in job["steps"] if each.get("uses") == "./"]
    assert set(use["with"]) <= set(ACTION["inputs"])
    assert [step["run"] for step in GATE["jobs"]["test"]["steps"][-2:]] == [
        "make test-all",
        "make docs",
    ]


@cases(
    "example",
    "vit",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("quickstart", "long-run")),
)
def test_the_gate_writes_the_project_and_what_it_needs(
    tmp_path: Path, tools: Path, example: str
) -> None:
    (write,) = [
        each["run"]
        for each in GATE["jobs"]["examples"]["steps"]
        if each.get("name") == "Write the project"
    ]
    (tmp_path / "skill").symlink_to(ROOT / "skill")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = "\n".join(line for line in write.splitlines() if "pip install --quiet" not in line)
    done = shell(lines, tmp_path, tools, EXAMPLE=example)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "project" / "verify.yaml").is_file()
    assert (tmp_path / "project" / "vit.py").exists() is (example == "vit")
    wanted = scaffold.context(load(tmp_path / SPECS[example].relative_to(ROOT)))["wanted_packages"]
    needed = (tmp_path / "requirements.txt").read_text().split()
    assert needed[0].startswith("torch==") and set(needed) >= {"numpy", *wanted}


def only_known(line: str) -> str:
    """A verify line without the reports of formats that this version does not have."""
    return re.sub(r" --report (\w+)(=\S+)?", lambda m: m[0] if m[1] in RENDERERS else "", line)


def test_the_workflow_of_a_scaffold(projects: dict[str, Path], tools: Path) -> None:
    (job,) = as_github((projects["github"] / ".github" / "workflows" / "verify.yml").read_text())[
        "jobs"
    ].values()
    lines = {each["name"]: each["run"] for each in job["steps"] if "run" in each}
    refused = shell(lines["Install"], projects["github"], tools, FSDP2_SOURCE="")
    assert refused.returncode != 0 and "FSDP2_SOURCE" in refused.stderr
    (tools / "python").write_text("#!/bin/sh\nprintf '[%s]' \"$@\"\n")
    done = shell(lines["Install"], projects["github"], tools, FSDP2_SOURCE="git+https://x y")
    assert done.stdout.endswith("[git+https://x y][.]")
    done = shell(f"{only_known(lines['Verify'])} --tier static", projects["github"], tools)
    assert done.returncode == 4, done.stderr
    assert "verdict: no_findings" in (projects["github"] / "reports" / "report.txt").read_text()


def test_the_gitlab_jobs(projects: dict[str, Path], tools: Path) -> None:
    found = [
        yaml.safe_load((projects["gitlab"] / ".gitlab-ci.yml").read_text()),
        *documented("artifacts:"),
    ]
    assert len(found) == 2, "the scaffold's, and the one in the documents"
    for one in found:
        jsonschema.Draft7Validator(schema("gitlab-ci")).validate(one)
        (job,) = one.values()
        verify = [line for line in job["script"] if line.startswith("fsdp2 verify")]
        assert len(verify) == 1 and f"junit={job['artifacts']['reports']['junit']}" in verify[0]
        (check,) = [line for line in job["script"] if "FSDP2_SOURCE:?" in line]
        assert shell(check, projects["gitlab"], tools).returncode != 0
        assert shell(check, projects["gitlab"], tools, FSDP2_SOURCE="x").returncode == 0
    (verify,) = (line for line in found[0]["verify"]["script"] if line.startswith("fsdp2 verify"))
    done = shell(f"{only_known(verify)} --tier static", projects["gitlab"], tools)
    assert done.returncode == 4 and "verdict: no_findings" in done.stdout


def test_a_project_without_ci(tmp_path: Path) -> None:
    spec = load(ROOT / "examples" / "quickstart.yaml", ["verify.ci=none"])
    files = scaffold.render(spec)
    assert [path for path in files if path.startswith(".")] == [".gitignore"]
    assert "FSDP2_SOURCE" not in files["README.md"]


def test_the_hooks() -> None:
    by_id = {hook["id"]: hook for hook in HOOKS}
    assert set(by_id) == {"fsdp2-lint", "fsdp2-spec"}
    for hook in HOOKS:
        script, *words = shlex.split(hook["entry"])
        assert (ROOT / script).stat().st_mode & stat.S_IXUSR and (
            ROOT / script
        ).read_text().startswith("#!")
        assert hook["language"] == "script" and words
    files = re.compile(by_id["fsdp2-spec"]["files"])
    yes, no = (
        ("spec.yaml", "a/spec.yaml", "a/big.fsdp2.yaml"),
        ("verify.yaml", "a/myspec.yaml", "spec.yaml.j2"),
    )
    assert all(files.search(name) for name in yes) and not any(files.search(name) for name in no)


def test_the_documents_name_hooks_and_inputs_that_there_are() -> None:
    (config,) = documented("hooks:")
    assert [hook["id"] for repo in config["repos"] for hook in repo["hooks"]] == [
        hook["id"] for hook in HOOKS
    ]
    (workflow,) = documented("OWNER/verified-fsdp2@")
    (use,) = [
        each for each in workflow["jobs"]["verify"]["steps"] if each["uses"].startswith("OWNER/")
    ]
    assert set(use["with"]) <= set(ACTION["inputs"]) and use["uses"].endswith(f"@v{__version__}")
    used = re.findall(r"outputs\.(\w+)", json.dumps(workflow))
    assert used and set(used) <= set(ACTION["outputs"])


def entry(name: str) -> list[object]:
    """The script of a hook and its words."""
    (found,) = [hook["entry"] for hook in HOOKS if hook["id"] == name]
    script, *words = shlex.split(found)
    return [ROOT / script, *words]


@pytest.mark.parametrize(("path", "code"), [(FAULT, 1), (RIGHT, 0)])
def test_the_lint_hook_needs_no_package(tmp_path: Path, path: Path, code: int) -> None:
    """`-S`: no site-packages; the hook runs as pre-commit starts it, from its clone."""
    python("-S", "-E", *entry("fsdp2-lint"), path, status=code, cwd=tmp_path, env={})


def test_the_spec_hook_names_the_package_that_it_needs(tmp_path: Path) -> None:
    specs = [ROOT / "examples" / "quickstart.yaml", ROOT / "examples" / "bf16.yaml"]
    for options, code, said in (
        ([], 0, "bf16.yaml: ok"),
        (["-S", "-E"], 2, "this Python has no yaml"),
    ):
        done = python(*options, *entry("fsdp2-spec"), *specs, status=code, cwd=tmp_path, env={})
        assert said in done.stdout + done.stderr
