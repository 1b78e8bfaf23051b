import ast
from pathlib import Path
from typing import TypeGuard

from ...trace.events import Optimizer, UnreadSettings
from ..base import Evidence, Finding, Rule, some


class GroupSettingUnread(Rule):
    """An optimizer reads the settings that its parameter groups are given.

    Why: a parameter group takes any key, and no optimizer refuses one that it does not know.
    `betas` for a Muon whose settings are `beta1` and `beta2`, or `weight_decay` for an optimizer
    without it, change nothing: the group trains with the defaults.
    Wrong:
        groups = [{"params": [*model.parameters()], "betas": (0.95, 0.98)}]
        optimizer = torch.optim.SGD(groups, lr=0.1)  # SGD has no betas
    Right:
        groups = [{"params": [*model.parameters()], "momentum": 0.95}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    Fix: Give the setting under the name that the optimizer reads, or remove it.
    Source: microsoft/dion at 0a059a4, train.py:342 (`betas` of the embedding's group;
    `_fused_adamw_` gets the defaults). A setting is a number under the name of a setting of torch's
    own optimizers that the optimizer does not declare in its defaults.
    """

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or (
            ""
            if evidence.trained.all(UnreadSettings)
            else "no group has a setting that its optimizer does not declare"
        )

    def judge(self, evidence: Evidence) -> Finding:
        train = evidence.trained
        read = {(r.optimizer, name) for r in train.all(UnreadSettings) for name in r.read}
        last = {r.optimizer: r for r in train.places(UnreadSettings)}
        for number, record in last.items():
            unread = {
                k: v
                for k, v in record.unread.items()
                # A setting that the project itself reads from a group (a schedule's lr_scale, a
                # log's name) is for that, not for the optimizer (dion (public trainer: `betas` for
                # a Muon that reads beta1, beta2); names such as lr_scale of right scripts).
                if (number, k) not in read and not _read_by(evidence, k, record.cls)
            }
            if unread:
                given = ", ".join(f"`{name}` = {value}" for name, value in unread.items())
                what = (
                    f"groups of {record.cls} are given {given}, which none of its {record.step}"
                    " steps reads"
                )
                return self.failed(
                    f"{what}; it reads {some(sorted(record.read), 8)}",
                    train.line_of(Optimizer, number=number),
                )
        return self.passed("what the groups are given beside the optimizer's own settings is read")


def _read_by(evidence: Evidence, name: str, cls: str) -> bool:
    """Whether the project takes the setting out of a group, for a schedule, a log, or at its
    construction; not in another optimizer.
    """
    module, _, own = cls.rpartition(".")
    for file in evidence.sources.project:
        here = own if module == "__main__" or Path(file).stem == module.rpartition(".")[2] else ""
        tree = evidence.sources.tree(file)
        others = {
            part
            for one in ast.walk(tree)
            if _steps(one) and one.name != here
            for part in ast.walk(one)
        }
        # Another optimizer of the project that reads `betas` says nothing of this one: reads within
        # other classes with a `step` do not count (dion).
        if any(_reads(node, name) and node not in others for node in ast.walk(tree)):
            return True
    return False


def _steps(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    methods = node.body if isinstance(node, ast.ClassDef) else []
    return any(isinstance(one, ast.FunctionDef) and one.name == "step" for one in methods)


def _reads(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    # Ways to take a setting out of a dict besides a subscript.
    return node.func.attr in ("get", "pop") and any(
        isinstance(a, ast.Constant) and a.value == name for a in node.args[:1]
    )
