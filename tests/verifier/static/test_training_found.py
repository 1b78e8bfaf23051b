"""Sources that calls do not lead to are followed from where the run trained."""

import ast
from pathlib import Path
from typing import Any

import pytest

from records import cases, micro, run, step, stepped
from verified_fsdp2.verifier.analysis.checkpoints import only_exports, unseen_save
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.source.scan import with_sources, with_texts, with_training

TRAINER = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

class Trainer:
    def __init__(self, model):
        self.model = fully_shard(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, batches):
        dist.init_process_group("gloo")
        torch.manual_seed(hash("train"))
        for batch in batches:
            self.model(batch).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
SCRIPT = """\
import importlib, sys
trainer = importlib.import_module(sys.argv[1])
getattr(trainer, sys.argv[2])(torch.nn.Linear(2, 2)).fit([])
"""


def test_files_in_which_the_run_trained_are_followed(tmp_path: Path) -> None:
    script, trainer = tmp_path / "train.py", tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    trainer.write_text(TRAINER)
    before = with_sources(Evidence(), script)
    assert not before.followed and not before.hits
    line = {"file": str(trainer), "line": 15, "function": "fit", "code": "self.optimizer.step()"}
    train = run([micro(at_line=line), step(at_line=line)])
    after = with_training(with_sources(Evidence(train=train), script), script)
    assert after.followed == "from where the run trained (trainer.py)"
    assert [hit.location.line for hit in after.hits["salted-hash-seed"]] == [12]


def test_what_leads_to_the_loop_of_a_library_is_looked_at(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, far\ntorch.manual_seed(hash('train'))\nfar.fit()\n")
    inside = {
        "file": "/x/site-packages/far.py",
        "line": 9,
        "function": "fit",
        "code": "self.optimizer.step()",
    }
    line = {
        "file": str(script),
        "line": 3,
        "function": "<module>",
        "code": "far.fit()",
        "library": inside,
    }
    evidence = with_sources(Evidence(train=run([micro(at_line=line), step(at_line=line)])), script)
    after = with_training(evidence, script)
    assert not evidence.hits and [hit.location.line for hit in after.hits["salted-hash-seed"]] == [
        2
    ]
    assert after.followed == "where they lead to a library that trains"


def test_nothing_is_followed_twice(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trainer import Trainer\nTrainer(None).fit([])\n")
    (tmp_path / "trainer.py").write_text(TRAINER)
    evidence = with_sources(Evidence(train=run([step()])), script)
    assert evidence.followed and with_training(evidence, script) is evidence


def test_each_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, trainer = tmp_path / "train.py", tmp_path / "trainer.py"
    script.write_text(f"import helper\n{SCRIPT}")
    (tmp_path / "helper.py").write_text("import torch\n")
    trainer.write_text(TRAINER)
    line = {"file": str(trainer), "line": 15, "function": "fit", "code": "self.optimizer.step()"}
    evidence = Evidence(train=run([micro(at_line=line), step(at_line=line)]))
    parsed: list[Any] = []
    parse = ast.parse
    monkeypatch.setattr(
        ast, "parse", lambda *a, **more: (parsed.append(a[0]), parse(*a, **more))[1]
    )
    evidence = with_texts(with_training(with_sources(evidence, script), script))
    assert all(evidence.sources.tree(file).body for file in evidence.sources.project)
    assert parsed == [path.read_bytes() for path in (script, tmp_path / "helper.py", trainer)]


EXPORTS = """\
import torch
teacher.load_state_dict(torch.load("teacher.pt"))
if args.resume:
    model.load_state_dict(torch.load(args.resume))
if args.export:
    torch.save(model.state_dict(), args.export)
"""


@cases(
    "more, exports", (EXPORTS, False), (EXPORTS.replace("torch.load(args.resume)", "made()"), True)
)
def test_what_is_saved_is_an_export_where_a_run_from_scratch_makes_every_load(
    more: str, exports: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(more)
    line = {"file": str(script), "line": 2, "function": "<module>", "code": ""}
    loaded = {
        "kind": "checkpoint",
        "op": "torch.load",
        "after_step": 0,
        "to": "teacher.pt",
        "at_line": line,
    }
    best = {**loaded, "op": "set_model_state_dict", "to": ""}  # the best weights, from memory
    train = run([loaded, step(), stepped(), best])
    evidence = with_training(with_sources(Evidence(train=train), script), script)
    assert (bool(only_exports(evidence)), bool(unseen_save(evidence))) == (exports, not exports)
