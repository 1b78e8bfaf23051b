import ast
from collections.abc import Iterator

from ...analysis.comparison import gradients_apart, incomparable, limits, undecided, update_apart
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import NEW, Flow, hit_at
from ...source.lines import find_shard_use
from ...source.looks import text
from ...source.project import Module
from ...source.registry import detector
from ...trace import Run
from ...trace.events import Optimizer, ShardInStep
from ..base import Rule


class MatrixOptimizerOnLocalShard(Rule):
    """An optimizer of your own computes from whole tensors what needs whole tensors.

    Why: orthogonalising (Muon), preconditioning (Shampoo) and trust ratios (LAMB, LARS) are functions of the whole
    matrix. On `to_local()` they see some of its rows: another update, and another one at every world size (65 to 81 %
    off where it was measured). The loss falls all the same. Element by element on shards is fine.
    Wrong:
        with torch.no_grad():
            for p in model.parameters():
                grad = p.grad.to_local()  # some of the rows
                p.to_local().sub_(0.02 * grad / grad.norm())
    Right:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.02 * p.grad / p.grad.norm())  # on the DTensor: the norm of the whole
    Fix: Compute on the DTensor itself, or gather the matrix with `full_tensor()`, update, and keep the own shard
    (`distribute_tensor`); or use an optimizer that knows DTensor.
    Source: MoonshotAI/Moonlight#27; NVIDIA/Megatron-LM#5961; microsoft/dion PR#74; axolotl PR#2464.
    """

    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def applies(self, evidence: Evidence) -> str:
        return "" if _own(evidence.trained) else "the optimizers are torch's own"

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.full_precision, evidence.single
        if run is None or run.steps() == 0 or not run.completed:
            return self.unknown(evidence.missing.get("full_precision", "no run in full precision was completed"))
        cls = _own(evidence.trained)[0].rpartition(".")[2]
        line = evidence.line_of(run, ShardInStep) or find_shard_use(evidence.sources, cls)
        if line is None:
            return self.passed(f"{cls} asks for no shard")
        if run.world_size == 1:
            return self.unknown("one rank holds every tensor whole")
        if single is None:
            return self.unknown(evidence.missing.get("single", "no run in one process was made"))
        if (reason := incomparable(run, single, "single", "one process")) is not None:
            return self.unknown(f"{cls} works on shards, and {reason}")
        allowed = limits(evidence, self.name)
        gradients = max(gradients_apart(run, single, at_step=True).values(), default=0.0)
        if not gradients <= allowed.allowed["gradient at the step"]:
            return self.unknown(f"{cls} works on shards, and is given other gradients than in one process")
        update, _ = update_apart(run, single, 1)
        limit = allowed.allowed["update"]
        if update <= limit:
            return self.passed(
                f"{cls} works on shards and makes the update of one process", measured=update, limit=limit
            )
        if not allowed.differ({"update": update}):
            return self.unknown(f"{cls} works on shards: {undecided('first update', update, allowed)}")
        return self.failed(
            f"{cls} works on shards: from gradients that agree within {gradients:.1e}, its first update on {run.world_size} ranks is "
            f"{update:.0%} off that of one process",
            line,
            measured=update,
            limit=limit,
        )


def _own(run: Run) -> list[str]:
    """The classes of optimizers that are not torch's."""
    return [record.cls for record in run.places(Optimizer) if not record.cls.startswith("torch.optim.")]


_MATRIX = ("svd", "qr", "inverse", "eigh", "matrix_norm", "mm", "matmul", "bmm", "addmm")


_GATHERS = (
    "full_tensor",
    "redistribute",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "all_reduce",
    "distribute_tensor",
)


@detector("matrix-optimizer-on-local-shard")
def matrix_optimizer_on_local_shard(flow: Flow) -> Iterator[Hit]:
    """A `step` of the project's own optimizer that multiplies local shards as if they were whole matrices."""
    done = set()
    for event in flow.ops(NEW):
        info = event.result.cls
        if info is None or info.name in done or not any(event is e for e, _ in flow.optimizers):
            continue
        done.add(info.name)
        names = {n for m in info.methods.values() for n in _words(m)}
        helpers = [f for f in ast.walk(info.home.tree) if isinstance(f, ast.FunctionDef) and f.name in names]
        bodies = [*info.methods.values(), *helpers]
        words = {word for body in bodies for word in _words(body)}
        multiplies = words & set(_MATRIX) or any(isinstance(n, ast.MatMult) for b in bodies for n in ast.walk(b))
        local = next(
            (n for b in bodies for n in ast.walk(b) if isinstance(n, ast.Attribute) and n.attr in _LOCAL), None
        )
        if multiplies and local is not None and not words & set(_GATHERS):
            yield _hit(info.home, local, info.name)


_LOCAL = ("to_local", "_local_tensor")


def _words(node: ast.AST) -> set[str]:
    """Every name and attribute in a piece of code."""
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    }


def _hit(module: Module, node: ast.Attribute, name: str) -> Hit:
    told = f"{name} multiplies matrices that are one rank's shard: {text(node)}"
    return hit_at("matrix-optimizer-on-local-shard", told, module, node.lineno, f"{name}.step")
