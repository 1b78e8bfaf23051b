from itertools import pairwise

from ...analysis.ending import changes_later
from ...analysis.state import apart, states
from ...analysis.syntax import called
from ...evidence import Sources
from ...trace.events import Step
from ..base import Evidence, Finding, Rule, Run, count, some

# Statistics that are computed anew before the average is evaluated (torch's update_bn, or a reset
# of the running ones) need not follow in training (exam round 7 fb_01_ema_latent_diffusion: fault,
# missed).
_RECALIBRATES = frozenset({"update_bn", "reset_running_stats"})


class AverageWithoutBuffers(Rule):
    """A model whose parameters follow those of a trained one has its buffers, too.

    Why: an average that is updated by `parameters()` alone keeps its initial buffers: statistics of
    batch normalisation, scales of the data. Its weights are right, and what it computes is not.
    Wrong:
        for mean, param in zip(teacher.parameters(), model.parameters()):
            mean.lerp_(param.detach(), 0.1)
    Right:
        for mean, param in zip(teacher.parameters(), model.parameters()):
            mean.lerp_(param.detach(), 0.1)
        for mean, buffer in zip(teacher.buffers(), model.buffers()):
            mean.copy_(buffer)
    Fix: Copy the buffers when the average is updated (`AveragedModel(model, use_buffers=True)`), or
    compute them anew from data before it is evaluated (`torch.optim.swa_utils.update_bn`).
    Source: the documentation of `torch.optim.swa_utils.AveragedModel` ("use_buffers"); law L6: the
    probe compares the buffers of a model that no optimizer holds and whose parameters move, with
    those of the trained model of the same parameters.
    """

    def applies(self, evidence: Evidence) -> str:
        return (
            ""
            if _followers(evidence.trained)
            else "no model follows another one that has floating-point buffers"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        kept: list[str] = []
        for own, trained in _followers(run):
            values = states(run.traces[0])
            first, last = (values[step] for step in (min(values), max(values)))
            for name in _buffers(run, trained):
                mine, theirs = f"{own}.{name}", f"{trained}.{name}"
                begun = next((v[mine] for v in values.values() if mine in v), None)
                moved = (
                    theirs in first and theirs in last and apart(first[theirs], last[theirs]) > 0.0
                )
                if (
                    moved
                    and begun is not None
                    # Integer buffers (num_batches_tracked, tables of positions) are counts or
                    # constants: an average of them means nothing.
                    and "float" in begun.dtype
                    and mine in last
                    and apart(begun, last[mine]) == 0.0
                ):
                    kept.append(mine)
        # A script may recalibrate its average's statistics after the training: what never changes
        # in the compared steps is a fault only if the end of the survey run has the same value
        # (exam round 11 mc_12_sam_swa_series).
        kept = [name for name in kept if not changes_later(evidence, name)]
        if kept and not _recalibrated(evidence.sources):
            line = next((r.at_line for r in run.places(Step)), None)
            what = f"{some(kept)} {'keeps its' if len(kept) == 1 else 'keep their'} initial values"
            return self.failed(
                f"{what}, while the parameters of that model follow those of the trained one, whose"
                " buffers move",
                line,
            )
        return self.passed(
            f"the buffers of {count(len(_followers(run)), 'model')} move with those of the"
            " trained one"
        )


def _followers(run: Run) -> list[tuple[str, str]]:
    """(name of a root that no optimizer holds and whose parameters move, name of the trained root
    of the same parameters and buffers).
    """
    steps = run.traces[0].steps if run.traces else []
    held = {name for record in steps for name in record.held}
    moved = {
        n
        for a, b in pairwise(steps)
        for n, w in b.weights.items()
        if n in a.weights and a.weights[n] != w
    }
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for model in run.models:
        own = {p.name.removeprefix(model.root): tuple(p.shape) for p in model.parameters}
        shapes[model.root] = own
    found = []
    for root, own in shapes.items():
        names = {root + name for name in own}
        # Only a model that no optimizer holds and whose weights move follows another one: a frozen
        # teacher keeps its own buffers rightly (zoo/averaged_evaluation.py, zoo/frozen_teacher.py).
        if not names or names & held or not names & moved:
            continue
        for other, theirs in shapes.items():
            if (
                other != root
                # Names and shapes of all parameters equal: only then is it an average of that
                # model, whose buffers are its as well.
                and theirs == own
                and {other + name for name in theirs} & held
                and _buffers(run, _path(other))
            ):
                found.append((_path(root), _path(other)))
    return found


def _path(root: str) -> str:
    return root.rstrip(".") or "model"


def _buffers(run: Run, path: str) -> list[str]:
    """The floating-point buffers of a root, without its name."""
    model = next(m for m in run.models if _path(m.root) == path)
    return [b.name.removeprefix(model.root) for b in model.buffers]


def _recalibrated(sources: Sources) -> bool:
    """Whether the project computes statistics of a model anew, as after an average of weights."""
    return any(called(sources.tree(file)) & _RECALIBRATES for file in sources.project)
