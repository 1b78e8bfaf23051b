import re
from collections.abc import Iterator

from ...source.flow_queries import made_by, text
from ...trace.events import Mesh, Wrap
from ..base import Evidence, Finding, Flow, Hits, Rule, Run

# A name is no proof: with other names the same calls would be right, so that this only warns.
BY_NAME = " (judged by the names of the dims, which the numbers of this run do not contradict)"


class MeshArgumentWrong(Rule):
    """A 2-D mesh for `fully_shard` is (replicate, shard) and has no dim of another parallelism.

    Why: `fully_shard` reads dims by position, not by name: dim 0 replicates, dim 1 shards. With
    reversed names it replicates over the dim named shard. A whole ("dp", "tp") mesh gives hybrid
    sharding over the tp dim: no tensor parallelism, and the ranks of a tp group average gradients
    of the same samples.
    Wrong:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "dp_replicate"))
        model = shard(Decoder(), mesh=mesh)
    Right:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = shard(Decoder(), mesh=mesh)
    Fix: Name and order the mesh ("dp_replicate", "dp_shard"[, "tp"]) and pass only its
    data-parallel part.
    Source: the docstring of `fully_shard` against pytorch/torchtitan docs/fsdp.md; pytorch#124019.
    """

    wants = "run"
    simulated = True
    shards = re.compile(r"shard|fsdp", re.I)
    replicates = re.compile(r"repl|ddp", re.I)
    # Names of dims that no data-parallel dim has; fully_shard would shard or replicate over them
    # (faults mesh_argument_wrong*.yaml).
    foreign = re.compile(
        r"^(tp|tensor|tensor_parallel|model_parallel|pp|pipe|pipeline|pipeline_parallel)$", re.I
    )

    def applies(self, evidence: Evidence) -> str:
        judged = not evidence.trained.models or any(_by_position(evidence.trained))
        return (
            ""
            if judged
            else "fully_shard is given no mesh of two named dims that it reads by position"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        large = [(record, mesh) for record, mesh in _by_position(run) if max(mesh.shape) > 1]
        for record, mesh in large:
            first, second = mesh.names
            how = (
                f"fully_shard gets the mesh {first}={mesh.shape[0]} x {second}={mesh.shape[1]}: it"
                f" replicates over dim 0, '{first}', and shards over dim 1, '{second}'"
            )
            for dim, name in enumerate(mesh.names):
                if self.foreign.search(name):
                    found = f"{how}; '{name}' is not a data-parallel dim"
                    if _same_samples(run, mesh, dim):
                        found += ", and its ranks train on the same samples"
                        return self.failed(found, record.at_line)
                    return self.failed(f"{found}{BY_NAME}", record.at_line, required=False)
            # fully_shard reads a 2D mesh by position (replicate, shard): it is reversed only if the
            # first name says shard and the second replicate (zoo/hsdp.py).
            reversed_names = self.shards.search(first) and not self.replicates.search(first)
            if reversed_names and self.replicates.search(second):
                return self.failed(f"{how}{BY_NAME}", record.at_line, required=False)
        if not run.models:
            return self.unknown("no forward of a model was seen")
        if not large:
            return self.unknown("both dims of the mesh have size 1: give a larger --nproc")
        return self.passed(
            f"fully_shard replicates over dim 0 and shards over dim 1 of {large[0][1].names}"
        )

    def detect(self, flow: Flow) -> Hits:
        seen: set[int] = set()
        for event, _ in flow.shards:
            mesh = event.arg(1, "mesh")
            made = made_by(mesh, "dist.init_device_mesh") if mesh is not None else None
            names = made.arg(2, "mesh_dim_names") if made is not None else None
            if (
                made is None
                or names is None
                or names.kind not in ("tuple", "list")
                or id(made) in seen
            ):
                continue
            words = [part.const for part in names.parts if isinstance(part.const, str)]
            if len(words) == 2 and "shard" in words[0] and "repl" in words[1]:
                order = "replicates over the first dimension and shards over the second"
                what, at = (
                    f"fully_shard {order}; {text(names.node or made.node)} says the reverse",
                    made,
                )
            elif len(words) == 2 and words[1] in _MODEL:
                what, at = (
                    f"fully_shard is given the whole mesh: it also shards over {words[1]!r}",
                    event,
                )
            else:
                continue
            seen.add(id(made))
            yield what, at
        for event in flow.ops("tp.parallelize_module"):
            model = event.arg(0, "module")
            shard = flow.managed_by(model, event) if model is not None else None
            if shard is not None:
                what = (
                    f"parallelize_module is called after fully_shard (line {shard.line}): apply"
                    " tensor parallelism first"
                )
                yield what, event


def _same_samples(run: Run, mesh: Mesh, dim: int) -> bool:
    """Whether the ranks along a dim of a mesh of two are given the same samples in step 1."""
    given = [{row for micro in own for row in micro.rows} for own in run.micros(1)]
    if len(given) != len(mesh.ranks) or not all(given):
        return False
    samples = [given[rank] for rank in mesh.ranks]
    stride = 1 if dim == 1 else mesh.shape[1]
    first = [place for place in range(len(samples)) if place // stride % mesh.shape[dim] == 0]
    along = range(1, mesh.shape[dim])
    return all(samples[one] == samples[one + stride * n] for one in first for n in along)


def _by_position(run: Run) -> Iterator[tuple[Wrap, Mesh]]:
    """The calls of fully_shard with a mesh of two named dims, which it reads by position."""
    for record in run.places(Wrap):
        # A call that names its dims explicitly does not read them by position (torch with explicit
        # dims).
        if record.mesh is not None and len(record.mesh.names) == 2 and not record.explicit_dims:
            yield record, record.mesh


_MODEL = (
    "tp",
    "tensor_parallel",
    "pp",
    "pipeline_parallel",
    "ep",
    "expert_parallel",
    "cp",
    "context_parallel",
)
