"""The rule `clip-mixed-mesh`."""

from __future__ import annotations

from ...analysis.root_cause import Blame
from ...trace import Run
from ..base import RaisedRule
from ..raised import by_norm


class ClipMixedMesh(RaisedRule):
    """Gradients that are clipped together lie on one mesh.

    Why: with tensor or expert parallelism some weights are on the (dp, tp) mesh and the rest on dp alone. One norm over
    both stacks DTensors of different meshes, which torch refuses.
    Wrong:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # some weights on (dp, tp), some on dp
    Right:
        by_mesh = {}
        for param in model.parameters():
            by_mesh.setdefault(param.device_mesh, []).append(param.grad)
        norms = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
        total = torch.stack([norm.full_tensor() for norm in norms]).norm()
        for mesh, grads in by_mesh.items():
            torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.device_mesh == mesh], max_norm, total)
    Mend: Take one norm for each mesh with `get_total_norm`, join them with `.full_tensor()`, and clip each mesh's
    parameters by the joint norm; or give the remaining modules a plan on the tp mesh too.
    Source: pytorch#180346; meta-pytorch/torchtune#2420; huggingface/accelerate PR#4219.
    Torch: run on 2.13.0.
    """

    pattern = r"All operands in aten\.\S+ must have the same mesh"

    def fits(self, run: Run, cause: Blame) -> bool:
        return by_norm(run, cause)
