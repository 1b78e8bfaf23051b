"""Rules on errors of meshes, of gradient reduction and of FSDP1's idioms, which torch tells in its own words."""

from __future__ import annotations

import re

from ..blame import Blame
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run
from .base import RaisedRule
from .raised_mixed import stack


def by_norm(run: Run, cause: Blame) -> bool:
    """Whether an error came up where norms of many tensors are joined."""
    joined = re.search(r"aten\.(stack|cat|_foreach_norm|linalg_vector_norm)\.", cause.error) is not None
    return joined or any("clip_grad" in f["file"] for f in stack(run, cause))


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

    name = "clip-mixed-mesh"
    family = "clipping"
    pattern = r"All operands in aten\.\S+ must have the same mesh"

    def fits(self, run: Run, cause: Blame) -> bool:
        return by_norm(run, cause)


class TensorsOnTwoMeshes(RaisedRule):
    """DTensors that are combined lie on one mesh.

    Why: a mesh is compared by its shape and names. Two models that were sharded over meshes made apart (one with names,
    one without; one 1-D, one 2-D) hold the same numbers on the same ranks, and no operation takes both.
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
    Mend: Make one mesh and give it to every `fully_shard`.
    Source: the message of torch 2.13.0 in `torch/distributed/tensor`.
    Torch: run on 2.13.0.
    """

    name = "tensors-on-two-meshes"
    family = "wrapping"
    pattern = r"Cannot run aten\.\S+ on inputs with different meshes|All operands in aten\.\S+ must have the same mesh"

    def fits(self, run: Run, cause: Blame) -> bool:
        return "different meshes" in cause.error or not by_norm(run, cause)


class MeshRefused(RaisedRule):
    """The mesh has as many ranks as the run, and one dimension, or two with names.

    Why: with two dimensions `fully_shard` shards over the second and replicates over the first, and finds them by name.
    A mesh of more ranks than there are cannot be made.
    Wrong:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
        shard(model, mesh=mesh)  # raises AssertionError
    Right:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        shard(model, mesh=mesh)
    Mend: Give `init_device_mesh` `mesh_dim_names`, and sizes whose product is the number of ranks.
    Source: the messages of torch 2.13.0 in `_fsdp_init.py` and `device_mesh.py`.
    Torch: run on 2.13.0.
    """

    name = "mesh-refused"
    family = "wrapping"
    pattern = (
        r"Please init the 2D mesh for HSDP with mesh_dim_names specified|fully_shard expects a 1D or 2D DeviceMesh|"
        r"Mesh should not be bigger than default world size \d+, but found (?P<ranks>\d+) ranks|"
        r"Invalid mesh_dim_names"
    )

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        ranks = re.search(r"but found (\d+) ranks", found.evidence) if found.status == "fail" else None
        if ranks is None:
            return found
        fix = f"Run it on {ranks[1]} ranks (`--nproc {ranks[1]}`), or make the mesh from the number of ranks."
        return self.failed(found.evidence, found.location, fix=fix)


class GlooPremulSum(RaisedRule):
    """With gloo, a gradient divide factor goes with sum reduction.

    Why: FSDP puts a factor of your own into the reduction as NCCL's PREMUL_SUM, which gloo does not have.
    Wrong:
        model.set_gradient_divide_factor(1.0)
        loss_of(model, batch).backward()  # at two ranks: Cannot use ReduceOp.PREMUL_SUM with Gloo
    Right:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        loss_of(model, batch).backward()
    Mend: Call `set_force_sum_reduction_for_comms(True)` on every FSDPModule that has a divide factor.
    Source: the docstring of `set_gradient_divide_factor`; verl PR#7917.
    Torch: run on 2.13.0.
    """

    name = "gloo-premul-sum"
    family = "gradients"
    simulated = False
    pattern = r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"

    def place(self, run: Run, cause: Blame) -> Record | None:
        """Where the factor was set."""
        lines = [r["at_line"] for r in run.places("divide") if r["at_line"]]
        return lines[-1] if lines else cause.location


class NoSyncIdiom(RaisedRule):
    """Gradient accumulation uses `set_requires_gradient_sync`, not `no_sync`.

    Why: `no_sync` is a method of DDP and FSDP1. FSDP2 keeps your class and has a flag in its place. DDP's attribute
    `require_backward_grad_sync` can be set on a sharded module and does nothing: every micro-batch is reduced.
    Wrong:
        with model.no_sync():  # raises AttributeError
            loss_of(model, micros[0]).backward()
    Right:
        model.set_requires_gradient_sync(False)
        loss_of(model, micros[0]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, micros[1]).backward()
    Mend: Call `model.set_requires_gradient_sync(is_last_micro_batch)` before each forward, without `no_sync`.
    Source: huggingface/accelerate PR#3762; NVIDIA/cosmos-framework#161.
    Torch: run on 2.13.0.
    """

    name = "no-sync-idiom"
    family = "gradients"
    pattern = r"'FSDP\w*' object has no attribute 'no_sync'"

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        hits = evidence.hits.get(self.name, ())  # what no error tells
        return self.failed(hits[0].told, hits[0].location, tier="static") if hits and found.status == "pass" else found


class Fsdp1Idiom(RaisedRule):
    """What FSDP1 and DDP offered as methods and arguments is written as FSDP2 has it.

    Why: FSDP2 keeps your class: there is no wrapper with `.module`, `clip_grad_norm_`, `summon_full_params`, and
    `fully_shard` knows neither `sharding_strategy` nor `auto_wrap_policy`.
    Wrong:
        model.clip_grad_norm_(max_norm)  # raises AttributeError
    Right:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    Mend: `model.module` is `model`; `model.clip_grad_norm_(x)` is `torch.nn.utils.clip_grad_norm_(model.parameters(), x)`;
    `summon_full_params` is `get_model_state_dict` with `full_state_dict=True`; a sharding strategy is
    `reshard_after_forward` and the mesh; a wrap policy is one call of `fully_shard` for each block.
    Source: the FSDP1-to-FSDP2 guide in pytorch's `fully_shard` tutorial.
    Torch: run on 2.13.0.
    """

    name = "fsdp1-idiom"
    family = "wrapping"
    pattern = (
        r"'FSDP\w*' object has no attribute '(module|clip_grad_norm_|summon_full_params|state_dict_type|full_optim_state_dict|"
        r"_fsdp_wrapped_module|set_state_dict_type|optim_state_dict)'|"
        r"fully_shard\(\) got an unexpected keyword argument"
    )


RULES = (ClipMixedMesh, TensorsOnTwoMeshes, MeshRefused, GlooPremulSum, NoSyncIdiom, Fsdp1Idiom)
