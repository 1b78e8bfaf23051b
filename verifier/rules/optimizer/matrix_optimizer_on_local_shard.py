import ast
from collections.abc import Iterable, Mapping

from ...analysis.comparison import gradients_apart, incomparable, update_apart
from ...analysis.limits import first_updates_apart, limits, undecided
from ...source.events import NEW, Flow, hit_at
from ...source.flow_queries import LOCAL, text
from ...source.lines import find_shard_use
from ...trace.events import Optimizer, Place, ShardInStep
from ..base import Evidence, Finding, Hits, Rule, Run, count


class MatrixOptimizerOnLocalShard(Rule):
    """A custom optimizer computes whole-matrix operations on whole tensors, not on local shards.

    Why: orthogonalisation (Muon), preconditioning (Shampoo) and trust ratios (LAMB, LARS) are
    functions of the whole matrix. On `to_local()` they see some of its rows: the update is wrong,
    and differs at every world size (65 to 81 % off where it was measured). The loss still falls.
    Element-wise updates of shards are right.
    Wrong:
        with torch.no_grad():
            for p in model.parameters():
                grad = p.grad.to_local()  # some of the rows
                p.to_local().sub_(0.02 * grad / grad.norm())
    Right:
        with torch.no_grad():
            for p in model.parameters():
                # on the DTensor: the norm of the whole tensor
                p.sub_(0.02 * p.grad / p.grad.norm())
    Fix: Compute on the DTensor itself, or gather the matrix with `full_tensor()`, update it and
    keep the rank's shard (`distribute_tensor`); or use an optimizer that supports DTensor.
    Source: MoonshotAI/Moonlight#27; NVIDIA/Megatron-LM#5961; microsoft/dion PR#74; axolotl PR#2464.
    """

    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def applies(self, evidence: Evidence) -> str:
        # torch's optimizers work on DTensors or elementwise; only another class can use a local
        # shard as if it were whole.
        return "" if _own(evidence.trained) else "the optimizers are torch's own"

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.full_precision, evidence.single
        if run is None or run.steps() == 0 or not run.completed:
            return self.unknown(
                evidence.missing.get("full_precision", "no run in full precision was completed")
            )
        cls = _own(evidence.trained)[0].rpartition(".")[2]
        line = run.line_of(ShardInStep) or find_shard_use(evidence.sources, cls)
        if line is None:
            return self.passed(f"{cls} uses no local shard")
        if run.world_size == 1:
            return self.unknown("not checked with one rank, which holds every tensor whole")
        if single is None:
            return self.unknown(evidence.missing.get("single", "no run in one process was made"))
        if (reason := incomparable(run, single, "single", "one process")) is not None:
            return self.unknown(f"{cls} uses local shards, and {reason}")
        allowed = limits(evidence, self.name)
        gradients = max(gradients_apart(run, single, at_step=True).values(), default=0.0)
        # Updates say something of the optimizer only if it was given the gradients of one process.
        if not gradients <= allowed.allowed["gradient at the step"]:
            return self.unknown(
                f"{cls} uses local shards, and gets other gradients than in one process"
            )
        update, _ = update_apart(run, single, 1)
        limit = allowed.allowed["update"]
        if update <= limit and (hidden := self._hidden(evidence, cls, line)) is not None:
            return hidden
        if update <= limit:
            text = f"the first update of {cls}, which uses local shards, is that of one process"
            return self.passed(text, measured=update, limit=limit)
        if not allowed.differ({"update": update}):
            return self.unknown(
                f"{cls} uses local shards: {undecided('first update', update, allowed)}"
            )
        text = (
            f"the first update of {cls}, which uses local shards, is {update:.0%} off that of one"
            f" process (allowed: {limit:.1g})"
        )
        text += f", from gradients that agree within {gradients:.1e}"
        return self.failed(text, line, measured=update, limit=limit)

    def _hidden(self, evidence: Evidence, cls: str, line: Place) -> Finding | None:
        """The first update of a parameter differs, though the sum of all updates does not.

        In the sum of all updates the noise of parameters that begin at zero is larger than what the
        trust ratio of local shards changes: each parameter has its own limit (exam round 8
        ga_02_vision_lamb: missed).
        """
        hidden = first_updates_apart(evidence, self.name)
        if not hidden:
            return None
        first, (value, most) = next(iter(hidden.items()))
        text = (
            f"the first update of {first} by {cls}, which uses local shards, is {value:.0%} off"
            f" those of DDP and of one process (allowed: {most:.1g}), as in"
            f" {count(len(hidden), 'parameter')}, from equal gradients"
        )
        return self.failed(text, line, measured=value, limit=most)

    def detect(self, flow: Flow) -> Hits:
        """A `step` of the project's own optimizer that multiplies local shards as if they were
        whole matrices.
        """
        done: set[str] = set()
        for event, _ in flow.optimizers:
            info = event.result.cls if event.op == NEW else None
            if info is None or info.name in done:
                continue
            done.add(info.name)
            functions = (f for f in ast.walk(info.home.tree) if isinstance(f, ast.FunctionDef))
            bodies = {f.name: f for f in functions} | info.methods
            for local in _multiplied(_reached(info.methods, bodies), bodies)[:1]:
                what = f"{info.name} multiplies matrices that are one rank's shard: {text(local)}"
                yield what, hit_at("", "", info.home, local.lineno, f"{info.name}.step").location


def _multiplied(
    reached: list[ast.FunctionDef], bodies: Mapping[str, ast.FunctionDef]
) -> list[ast.Attribute]:
    """The first local shard in each function that mixes rows, itself or by what it calls; none
    where anything gathers. An elementwise step beside that of matrices uses shards rightly (dmuon).
    """
    if _words(n for body in reached for n in ast.walk(body)) & _GATHERS:
        return []
    shards = [
        (body, n)
        for body in reached
        for n in ast.walk(body)
        if isinstance(n, ast.Attribute) and n.attr in LOCAL
    ]
    return [n for body, n in shards if _multiplies(_reached({body.name: body}, bodies))]


def _reached(
    begin: Mapping[str, ast.FunctionDef], bodies: Mapping[str, ast.FunctionDef]
) -> list[ast.FunctionDef]:
    """These functions, and those of the file that they name, and so on."""
    found = dict(begin)
    waiting = list(begin.values())
    while waiting:
        for name in sorted(_words(ast.walk(waiting.pop())) & bodies.keys() - found.keys()):
            found[name] = bodies[name]
            waiting.append(bodies[name])
    return list(found.values())


def _multiplies(functions: list[ast.FunctionDef]) -> bool:
    """Whether functions mix the rows of a matrix."""
    nodes = [n for body in functions for n in ast.walk(body)]
    return bool(_words(nodes) & _MATRIX) or any(isinstance(n, ast.MatMult) for n in nodes)


def _own(run: Run) -> list[str]:
    """The classes of optimizers that are not torch's."""
    return [
        record.cls for record in run.places(Optimizer) if not record.cls.startswith("torch.optim.")
    ]


# Operations that mix rows, for which a rank's rows are not enough (Muon, Shampoo, LAMB's norms of
# matrices) (pairs.yaml matrix-optimizer-on-local-shard).
_MATRIX = {"svd", "qr", "inverse", "eigh", "matrix_norm", "mm", "matmul", "bmm", "addmm"}
# An optimizer that gathers (or reduces) before it multiplies has whole matrices (exam rounds
# k_05_muon_rows, w_17_owner_muon (right Muons)).
_GATHERS = {
    "full_tensor",
    "redistribute",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "all_reduce",
}
_GATHERS |= {"distribute_tensor"}


def _words(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name and attribute."""
    return {
        n.id if isinstance(n, ast.Name) else n.attr
        for n in nodes
        if isinstance(n, ast.Name | ast.Attribute)
    }
