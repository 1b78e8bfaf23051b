from ...source.events import Flow, covers
from ...source.flow_queries import is_nccl, made_by, process_groups
from ..base import Hits, SourceRule


class CpuOffloadNcclOnly(SourceRule):
    """With CPUOffloadPolicy the process group has a CPU backend.

    Why: `CPUOffloadPolicy` keeps shards and gradients in host memory, which NCCL does not support.
    The first collective on them (gradient norm, checkpoint), after the first step, raises "No
    backend type associated with device type cpu".
    Wrong:
        def build():
            dist.init_process_group("nccl")
            return fully_shard(Decoder(), offload_policy=CPUOffloadPolicy())
    Right:
        def build():
            dist.init_process_group("cpu:gloo,cuda:nccl")
            return fully_shard(Decoder(), offload_policy=CPUOffloadPolicy())
    Fix: Give the process group both backends: `init_process_group("cpu:gloo,cuda:nccl")`.
    Source: pytorch#148532, PR#136156; meta-pytorch/torchtune#1977; NVIDIA-NeMo/Automodel PR#3461.
    Torch: read from the sources alone; not run, it needs a GPU.
    """

    named_by = ("CPUOffloadPolicy",)

    def detect(self, flow: Flow) -> Hits:
        groups = process_groups(flow)
        given = ((event.kwargs.get("offload_policy"), event) for event, _ in flow.shards)
        made = ((made_by(policy, "fsdp.CPUOffloadPolicy"), event) for policy, event in given)
        # not under an option of its own
        always = any(policy is not None and covers(policy, event) for policy, event in made)
        # A group with gloo beside NCCL reduces gradients on the CPU; an offload under an option
        # need not be on (fault cpu_offload_nccl.yaml).
        if groups and all(is_nccl(e) for e in groups) and always:
            yield (
                "CPUOffloadPolicy keeps gradients on the CPU, and the process group has NCCL only",
                groups[0],
            )
