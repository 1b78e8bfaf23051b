import re

from ...analysis.applicability import went_through
from ...analysis.follow_up_runs import changes_gradients
from ..base import Evidence, RaisedRule, RootCause, Run
from ..raised import MIXED, by_norm, culprit


class ClipMixedMesh(RaisedRule):
    """Gradients are clipped together only if they are on one mesh.

    Why: with tensor or expert parallelism some weights are on the (dp, tp) mesh and the rest on dp
    alone. One norm over both stacks DTensors of different meshes, which raises an error. So does
    one over shards and the plain tensors of `ignored_params`.
    Wrong:
        # some weights on (dp, tp), some on dp
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    Right:
        by_mesh = {}
        for param in model.parameters():
            by_mesh.setdefault(param.device_mesh, []).append(param.grad)
        norms = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
        total = torch.stack([norm.full_tensor() for norm in norms]).norm()
        for mesh, grads in by_mesh.items():
            own = [p for p in model.parameters() if p.device_mesh == mesh]
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)
    Fix: Take one norm for each mesh with `get_total_norm`, join them with `.full_tensor()`, and
    clip each mesh's parameters by the joint norm, plain tensors as a mesh of their own; or give the
    remaining modules a plan on the tp mesh too.
    Source: pytorch#180346; meta-pytorch/torchtune#2420; huggingface/accelerate PR#4219.
    """

    pattern = rf"All operands in aten\.\S+ must have the same mesh|{MIXED}"

    def applies(self, evidence: Evidence) -> str:
        if not went_through(evidence) or self._raised(evidence) is not None:
            return ""
        sharded = [
            e
            for es in evidence.trained.parameters.values()
            for e in es
            if e.trainable and e.sharded
        ]
        if len({(e.rank, tuple(e.mesh), tuple(e.ranks)) for e in sharded}) == len(
            {e.rank for e in sharded}
        ):
            # The error needs norms of tensors on two meshes: with one mesh a rank it cannot occur
            # (zoo/tp_fsdp.py (two meshes) is about it; zoo/minimal.py is not).
            return "all parameters of a rank are on one mesh"
        return (
            ""
            if evidence.gradients or changes_gradients(evidence.trained)
            else "the script clips no gradient"
        )

    def fits(self, run: Run, cause: RootCause) -> bool:
        if re.search(MIXED, cause.error):
            return culprit(run, cause)[0] == self.name
        return by_norm(run, cause)
