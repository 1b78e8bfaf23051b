"""Which settings a script takes, which of them save and resume, and `set:` in copies of
configuration files.
"""

import json
from pathlib import Path

import pytest
import yaml

from records import cases
from scripts import written
from verified_fsdp2.verifier.config.commands import with_checkpoints
from verified_fsdp2.verifier.config.option import Option, by_purpose, suggested
from verified_fsdp2.verifier.config.settings import applied
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.pipeline import verify
from verified_fsdp2.verifier.source.options import options_of

ZOO = Path(__file__).parents[1] / "zoo"
ARGPARSE = """
parser = argparse.ArgumentParser()
add = parser.add_argument
add("-o", "--output-dir", default="runs")
add("--save-interval", type=int, default=100)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--train-data-dir")
"""
CLICK = """
@click.command()
@click.option("--checkpoint-freq", default=10)
@click.option("--ckpt-dir", type=str)
@click.option("--load-checkpoint")
def main(**kwargs): ...
"""
TYPER = """
@app.command()
def main(data: str, save_every: int = 5, out_dir: str = "out", resume: bool = False): ...
"""
FIRE = """
def main(save_steps=5, save_dir="out", resume_from=None): ...
fire.Fire(main)
"""
TYRO = """
class Saving:
    every_steps: int = 5
    folder: str = "out"
class Config:
    saving: Saving = field(default_factory=Saving)
    resume: bool = False
config = tyro.cli(Config)
"""
OMEGACONF = """
class Dump:
    every: int = 100
class Checkpoint:
    dump: Dump = field(default_factory=Dump)
class Args:
    dump_dir: str = ""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    gradient_checkpointing: bool = False
default = OmegaConf.structured(Args())
config = OmegaConf.merge(default, OmegaConf.from_cli())
"""
TRAINER = "parser = HfArgumentParser((ModelArguments, TrainingArguments))"


@cases(
    "source, save, resume",
    (ARGPARSE, "--save-interval 3 --output-dir {checkpoint}", "--output-dir {checkpoint} --resume"),
    (CLICK, "--checkpoint-freq 3 --ckpt-dir {checkpoint}", "--load-checkpoint {checkpoint}"),
    (TYPER, "--save-every 3 --out-dir {checkpoint}", "--out-dir {checkpoint} --resume"),
    (FIRE, "--save_steps 3 --save_dir {checkpoint}", "--resume_from {checkpoint}"),
    (
        TYRO,
        "--saving.every-steps 3 --saving.folder {checkpoint}",
        "--saving.folder {checkpoint} --resume",
    ),
    (OMEGACONF, "checkpoint.dump.every=3 dump_dir={checkpoint}", "dump_dir={checkpoint}"),
    (TRAINER, "--save_steps 3 --output_dir {checkpoint}", "--resume_from_checkpoint {checkpoint}"),
    ("parser.add_argument('--lr')", "", ""),
    ids=["argparse", "click", "typer", "fire", "tyro", "omegaconf", "trainer", "none"],
)
def test_options_show_how_a_script_saves_and_resumes(source: str, save: str, resume: str) -> None:
    assert suggested(options_of(Sources({"/p/train.py": source}, ("/p/train.py",)))) == (
        save,
        resume,
    )


def test_hydra_and_configuration_files(tmp_path: Path) -> None:
    keys = {
        "trainer": {"save_freq": -1, "default_local_dir": "out", "resume_from_path": None},
        "model": {"dim": 8},
    }
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sft.yaml").write_text(yaml.safe_dump(keys))
    script = str(tmp_path / "train.py")
    hydra = (
        '@hydra.main(config_path="conf", config_name="sft", version_base=None)\ndef main(config):'
        " ...\n"
    )
    found = options_of(Sources({script: hydra}, (script,)))
    words = (
        "trainer.save_freq=3 trainer.default_local_dir={checkpoint}",
        "trainer.resume_from_path={checkpoint}",
    )
    assert suggested(found) == words
    assert [option.name for option in by_purpose(found)["size"]] == ["model.dim"]
    args = ["--config", "conf/sft.yaml"]
    found = options_of(Sources({script: ""}, (script,)), args, tmp_path)
    assert suggested(found)[1] == "set:trainer.resume_from_path={checkpoint}"
    assert with_checkpoints(["fsdp2", "verify", "train.py"], *suggested(found), args).endswith(
        "-- --config conf/sft.yaml"
    )


@cases(
    "name, purpose",
    ("--gradient-checkpointing", ""),
    ("--resume-step", ""),
    ("--dataset-path", ""),
    ("--save-optimizer-steps", "save"),
    ("checkpoint.enable", ""),
    ("--max-steps", "steps"),
    ("--batch-size", "size"),
)
def test_purposes(name: str, purpose: str) -> None:
    assert Option(name).purpose == purpose
    assert Option("checkpoint.enable", default="False").purpose == "save"
    assert [
        Option("set:sentences.held_out", default=default).purpose for default in ("64", "runs")
    ] == ["", "folder"]


def test_set_changes_a_copy(tmp_path: Path) -> None:
    config = written(tmp_path, "checkpoint:\n  every: 0\nout: '{checkpoint}/x'\n", "run.yaml")
    (tmp_path / "other.json").write_text(json.dumps({"lr": 1}))
    words = [
        "--config=run.yaml",
        "set:checkpoint.every=3",
        "set:+new.key=true",
        "set:+checkpoint.folder={checkpoint}",
        "--other",
        "other.json",
        "set:lr=0.5",
    ]
    given, copies = applied(words, tmp_path, "/c", tmp_path / "run")
    folder = tmp_path / "run"
    assert given == [f"--config={folder}/run.yaml", "--other", str(folder / "1-other.json")]
    changed = {"checkpoint": {"every": 3, "folder": "/c"}, "out": "/c/x", "new": {"key": True}}
    assert yaml.safe_load(copies[folder / "run.yaml"]) == changed
    assert json.loads(copies[folder / "1-other.json"]) == {"lr": 0.5}
    assert "every: 0" in config.read_text()
    given, copies = applied(["--config", "none.yaml", "{checkpoint}"], tmp_path, "/c", folder)
    assert (given, copies) == (["--config", "none.yaml", "/c"], {})


@cases(
    "words, part",
    (["set:a=1"], "no configuration file"),
    (["a.yaml", "set:evry=1"], "did you mean every?"),
    (["a.yaml", "b.yaml", "set:every=1"], "several files"),
    (["c.toml", "set:every=1"], "TOML"),
    (["a.yaml", "set:every"], "KEY=VALUE"),
    (["a.yaml", "set:+every.deep=1"], "no mapping"),
)
def test_a_set_that_fits_nothing_is_a_usage_error(
    tmp_path: Path, words: list[str], part: str
) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("every: 1\n")
    (tmp_path / "c.toml").write_text("every = 1\n")
    with pytest.raises(UserError, match=part.replace("?", r"\?")):
        applied(words, tmp_path, "", Path())


def test_a_script_that_could_be_resumed_gets_the_command_for_it(tmp_path: Path) -> None:
    script = ZOO / "checkpoint_functions.py"
    verdict = verify(resolve(script, {"steps": "2", "quick": True}), tmp_path / "work")
    save, resume = "'--save-every 3 --out {checkpoint}'", "'--resume {checkpoint}'"
    assert (
        verdict.suggestion
        == f"fsdp2 verify {script} --steps 2 --quick --save-args {save} --resume-args {resume}"
    )


@pytest.mark.parametrize("root", ["nothing", "tests/zoo"])
def test_a_root_holds_the_script(root: str) -> None:
    with pytest.raises(UserError, match="root"):
        resolve(Path(__file__), {"root": root})
