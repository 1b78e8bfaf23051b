"""Commands and options that reports suggest: fsdp2 itself reads every one of them."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_options import ARGPARSE, CLICK, FIRE, OMEGACONF, TRAINER, TYPER, TYRO

from records import cases, run
from verified_fsdp2.skill import cli
from verified_fsdp2.skill.cli.verify import _parses
from verified_fsdp2.verifier.analysis.suggestion import arguments, in_a_copy
from verified_fsdp2.verifier.config.commands import explain, valued, with_checkpoints
from verified_fsdp2.verifier.config.option import suggested
from verified_fsdp2.verifier.config.parts import OPTIONS
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.pipeline import suggestion
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.source.options import options_of
from verified_fsdp2.verifier.trace.events import Place

ROOT = Path(__file__).parents[2]
FILE = "/p/train.py"
HEAD = """
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs")
parser.add_argument("--resume")
"""
NAMES = "|".join(cli.COMMANDS)
IN_BACKQUOTES = re.compile(rf"`(fsdp2 (?:{NAMES})[^`\n]*)`")
IN_HELP = re.compile(rf"^ +(fsdp2 (?:{NAMES})\b.*?)(?:  .*|, and .*| > .*)?$", re.M)
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def evidence(source: str, save: str = "torch.save", args: tuple[str, ...] = ()) -> Evidence:
    """A script of which a survey run has reached all lines but those marked with `# no`."""
    sources = Sources({FILE: source}, (FILE,))
    lines = source.splitlines()
    reached = [n for n, line in enumerate(lines, 1) if "# no" not in line]
    number = next((n for n, line in enumerate(lines, 1) if save in line), 0)
    record = {"kind": "reached", "steps": 0, "lines": {FILE: reached}, "backwards": 1}
    saving = Place(file=FILE, line=number, function="main", code="") if number else None
    made = run([record], role="survey")
    return Evidence(
        survey=made, sources=sources, saving=saving, options=options_of(sources, args, Path())
    )


@cases(
    "source, save, resume",
    (  # FSDPToys: the switch is for snapshots of memory, and what is loaded is a checkpoint
        "parser.add_argument('--snapshot', action='store_true')\n"
        "parser.add_argument('--save_freq', type=int, default=1)\n"
        "parser.add_argument('--save_path', default='ckpts')\n"
        "parser.add_argument('--load_path', default='ckpts/last')",
        "--save_freq 3 --save_path {checkpoint}",
        "--load_path {checkpoint}",
    ),
    (  # the switch gets no value
        HEAD + "parser.add_argument('--snapshot', action='store_true')",
        "--snapshot --out {checkpoint}",
        "--resume {checkpoint}",
    ),
    (
        HEAD + "parser.add_argument('--dump', type=bool)\nparser.add_argument('-c', '--no-save')",
        "--dump true --out {checkpoint}",
        "--resume {checkpoint}",
    ),
    (HEAD + "parser.add_argument('--save-count', action='count')", "--out {checkpoint}", None),
    (  # a file lies below the folder
        "parser.add_argument('--ckpt-path', default='out/model.pt')\n"
        "parser.add_argument('--resume-from')",
        "--ckpt-path {checkpoint}/model.pt",
        "--resume-from {checkpoint}/model.pt",
    ),
    (
        "parser.add_argument('--ckpt-path', default='model-{step}.pt')\n"
        "parser.add_argument('--resume-from')",
        "--ckpt-path {checkpoint}/model-{step}.pt",
        "--resume-from {checkpoint}",
    ),
    (  # neither a number nor one of some words is a path
        "parser.add_argument('--out')\nparser.add_argument('--resume', type=int)\n"
        "parser.add_argument('--resume-how', choices=['auto', 'never'])",
        "",
        "",
    ),
    (  # conditions before the save: what they read is given, too
        HEAD + "parser.add_argument('--keep-going', action='store_true')\n"
        "parser.add_argument('--ckpt', type=int, default=0)\n"
        "parser.add_argument('--steps', type=int, default=10)\n"
        "def write():\n"
        "    torch.save(x, args.out)  # no\n"
        "for step in range(args.steps):\n"
        "    if args.ckpt > 0 and step % args.ckpt == 0 and step < args.steps:\n"
        "        write()  # no\n",
        "--ckpt 3 --out {checkpoint}",
        "--resume {checkpoint}",
    ),
    (
        HEAD + "parser.add_argument('--export', action='store_true')\n"
        "parser.add_argument('--mode', default='fast')\n"
        "if args.export and config['mode'] == 'full':\n"
        "    torch.save(x, args.out)  # no\n",
        "--export --mode full --out {checkpoint}",
        "--resume {checkpoint}",
    ),
    (  # a parser that no run has built is another script's
        HEAD + "def other():\n    parser.add_argument('--save-every', type=int)  # no\n",
        "--out {checkpoint}",
        "--resume {checkpoint}",
    ),
)
def test_what_a_script_is_given_exists_there(source: str, save: str, resume: str | None) -> None:
    found = arguments(evidence(source))
    assert found == (save, "--resume {checkpoint}" if resume is None else resume)


def test_keys_of_a_toml_file(tmp_path: Path) -> None:
    """No command line sets them: the report names file and key, unless the script takes others."""
    config = tmp_path / "run.toml"
    config.write_text("[ckpt]\nevery = 0\nfolder = 'out'\nresume_from = ''\naccum_steps = 1\n")
    args = ("--config", str(config))
    made = evidence("torch.save(x)  # no", args=args)
    assert arguments(made) == ("", "")
    assert in_a_copy(made) == (
        "for its checkpoints, name a copy of run.toml with ckpt.every = 3, ckpt.folder ="
        ' "{checkpoint}" in --save-args; one with ckpt.resume_from = "{checkpoint}" in'
        " --resume-args"
    )
    merged = evidence("c = OmegaConf.merge(b, OmegaConf.from_cli())\ntorch.save(x)", args=args)
    assert arguments(merged)[1] == "ckpt.resume_from={checkpoint}" and not in_a_copy(merged)
    own = evidence(HEAD + "torch.save(x)", args=args)
    assert arguments(own)[0] == "--out {checkpoint}" and not in_a_copy(own)


def test_groups_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "base.yaml").write_text("defaults:\n  - _self_\n  - ckpt: local\nlr: 1\n")
    (tmp_path / "ckpt" / "local.yaml").write_text("save_every: 0\nfolder: out\nresume: null\n")
    script = str(tmp_path / "train.py")
    text = "@hydra.main(config_path='.', config_name='base')\ndef main(config): ..."
    found = suggested(options_of(Sources({script: text}, (script,))))
    assert found == ("ckpt.save_every=3 ckpt.folder={checkpoint}", "ckpt.resume={checkpoint}")


@pytest.mark.parametrize("source", [ARGPARSE, CLICK, TYPER, FIRE, TYRO, OMEGACONF, TRAINER])
def test_the_suggested_command_is_read(source: str) -> None:
    save, resume = suggested(options_of(Sources({FILE: source}, (FILE,))))
    made = with_checkpoints(["fsdp2", "verify", "train.py"], save, resume, ["--lr", "1"])
    assert _parses(made)
    read = cli.parse(shlex.split(made)[1:])
    assert (read.save_args, read.resume_args, read.script_args) == (save, resume, ["--lr", "1"])


def test_a_command_that_would_be_refused_is_not_suggested(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "run.yaml"
    script.write_text(HEAD)
    config.write_text("save_every: 0\nout: runs\nresume: null\n")
    target = resolve(script, {"args": ["--config", str(config)]})
    found = evidence("torch.save(x)  # no", args=target.args)
    made = suggestion(target, found)
    assert "'set:save_every=3 set:out={checkpoint}'" in made and _parses(made)
    config.write_text("save_every: 0\n")
    assert suggestion(target, found) == ""
    assert not _parses("fsdp2 verify train.py --save-arg") and not _parses("fsdp2 verfy")


@pytest.mark.parametrize("option", ["--save-args", "--resume-args", "--single-args"])
def test_a_value_that_begins_with_dashes(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = option[2:].replace("-", "_")
    for words in ([option, "--resume"], [option, "--a 1"], valued(option, "-x"), [option, "a=b"]):
        value = words[-1].removeprefix(f"{option}=")
        assert vars(cli.parse(["verify", "t.py", *words, "--nproc", "4"]))[name] == value
    with pytest.raises(SystemExit):
        cli.parse(["verify", "t.py", option, "--nproc", "4"])
    assert f"(one that begins with a dash: {option}=-...)" in capsys.readouterr().err


def texts() -> Iterator[tuple[str, str]]:
    """(where, text) of the texts in the code: constants, f-strings with X for what they hold."""
    for path in [p for folder in ("skill", "verifier") for p in (ROOT / folder).rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {part for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                yield where, node.value
            if isinstance(node, ast.JoinedStr):
                values = (getattr(part, "value", None) for part in node.values)
                yield where, "".join(v if isinstance(v, str) else "X" for v in values)


def options() -> set[str]:
    """The options of all commands."""
    parsers = cli._parser(cli.COMMANDS)[1].values()
    return {name for parser in parsers for name in parser._option_string_actions}


def test_commands_in_texts_are_read() -> None:
    found = list(texts())
    examples = [(where, line) for where, text in found for line in IN_HELP.findall(text)]
    assert len(examples) > 50
    assert [one for one in examples if not _parses(one[1])] == []
    named = [(where, one) for where, text in found for one in IN_BACKQUOTES.findall(text)]
    assert [one for one in named if not set(OPTION.findall(one[1])) <= options()] == []


def test_options_in_texts_are_there() -> None:
    known = options()
    assert set(OPTIONS.values()) <= known
    folders = ("analysis", "judging", "isolation", "report", "stages", "rules", "launch")
    named = [
        (where, option)
        for where, text in texts()
        if where.startswith(tuple(f"verifier/{folder}/" for folder in folders))
        for option in re.findall(r"(?:give|pass|with|by) (--[a-z][a-z-]+)", text)
    ]
    assert len(named) > 10
    assert [one for one in named if one[1] not in known] == []


def test_the_docs_of_every_rule_are_asked_for_by_a_command() -> None:
    assert all(_parses(explain(rule)) for rule in RULES)
