from ...analysis.applicability import meshes
from ..base import RaisedRule, RootCause, Run
from ..raised import by_norm


class TensorsOnTwoMeshes(RaisedRule):
    """DTensors in one operation are on the same mesh.

    Why: meshes are compared by shape and names. Two models that are sharded over separate meshes
    (one with names, one without; one 1-D, one 2-D) hold the same values on the same ranks, but no
    operation accepts both.
    Wrong:
        average = Decoder()
        shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        shard(average, mesh=torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        with torch.no_grad():
            average.scale.lerp_(model.scale, 0.1)  # raises RuntimeError
    Right:
        average = Decoder()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        shard(model, mesh=mesh)
        shard(average, mesh=mesh)
        with torch.no_grad():
            average.scale.lerp_(model.scale, 0.1)
    Fix: Make one mesh and give it to every `fully_shard`.
    Source: the message of torch 2.13.0 in `torch/distributed/tensor`.
    """

    pattern = (
        r"Cannot run aten\.\S+ on inputs with different meshes|All operands in aten\.\S+ must have"
        r" the same mesh"
    )

    def absent(self, train: Run) -> str:
        return "all sharded parameters are on one mesh" if meshes(train) < 2 else ""

    def fits(self, run: Run, cause: RootCause) -> bool:
        return "different meshes" in cause.error or not by_norm(run, cause)
