import re

from ..base import Evidence, Finding, RaisedRule


class MeshRefused(RaisedRule):
    """The mesh fits the world size and has one dim, or two named dims.

    Why: on a 2-D mesh `fully_shard` replicates over the first dim and shards over the second, and
    requires their names. A mesh of more ranks than the world size raises an error.
    Wrong:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
        shard(model, mesh=mesh)  # raises AssertionError
    Right:
        mesh = torch.distributed.init_device_mesh(
            "cpu", (1, 1), mesh_dim_names=("replicate", "shard")
        )
        shard(model, mesh=mesh)
    Fix: Give `init_device_mesh` `mesh_dim_names`, and sizes whose product is the number of ranks.
    Source: the messages of torch 2.13.0 in `_fsdp_init.py` and `device_mesh.py`.
    """

    named_by = ("init_device_mesh", "DeviceMesh", "mesh")
    pattern = (
        r"Please init the 2D mesh for HSDP with mesh_dim_names specified|fully_shard expects a 1D"
        r" or 2D DeviceMesh|"
        r"Mesh should not be bigger than default world size \d+, but found (?P<ranks>\d+) ranks|"
        r"Invalid mesh_dim_names"
    )

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        ranks = (
            re.search(r"but found (\d+) ranks", found.evidence) if found.status == "fail" else None
        )
        if ranks is None:
            return found
        fix = (
            f"Run on {ranks[1]} ranks (`--nproc {ranks[1]}`), or derive the mesh from the world"
            " size."
        )
        return self.failed(found.evidence, found.location, fix=fix)
