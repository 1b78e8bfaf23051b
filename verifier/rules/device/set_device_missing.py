from ...source.flow_queries import is_nccl, made_by, names_in, process_groups, text
from ...source.values import Value, choices
from ..base import Flow, Hits, SourceRule


class SetDeviceMissing(SourceRule):
    """Every rank sets its GPU before it moves anything to CUDA.

    Why: `.cuda()` and `.to("cuda")` mean the current device, which is GPU 0 in every process by
    default. All ranks of a node then use one GPU, or NCCL raises "Duplicate GPU detected".
    Wrong:
        def build():
            dist.init_process_group("nccl")
            return shard(Decoder().cuda())
    Right:
        def build():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
            return shard(Decoder().to(device))
    Fix: Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first; pass `device_id` to
    `init_process_group`.
    Source: awslabs/awsome-distributed-ai#1041; verl-project/verl#1752; pytorch#175531.
    `init_device_mesh("cuda", ...)` sets the device itself, if nothing was moved to a GPU before.
    Torch: read from the sources alone; not run, it needs two GPUs.
    """

    named_by = ("cuda", "nccl")

    def detect(self, flow: Flow) -> Hits:
        """A module is moved to the current GPU before a device is set."""
        groups = process_groups(flow)
        nccl = bool(groups) and all(is_nccl(event) for event in groups)
        # Ways to give each rank its GPU; a script that names one of them is not reported
        # (zoo/written_for_gpus.py, zoo/device_flag.py).
        words = ("set_device", "device_id", "CUDA_VISIBLE_DEVICES", "with torch.cuda.device")
        if (
            not flow.certain
            or not flow.roots
            or not nccl
            or names_in(flow, *words, "set_default_device", "device_index")
        ):
            return
        meshes = flow.ops("dist.init_device_mesh")
        for event in flow.methods("cuda", "to"):
            if (
                event.on is None
                or not flow.is_module(event.on)
                # init_device_mesh sets the current CUDA device by the local rank (torch
                # init_device_mesh).
                or (meshes and meshes[0].index < event.index)
            ):
                continue
            bare = event.method == "cuda" and not event.args and not event.kwargs and not event.open
            if bare or (event.method == "to" and _bare_cuda(event.arg(0, "device"))):
                yield f"{text(event.node)}: no device is set, so all ranks use GPU 0", event
                return


def _bare_cuda(value: Value | None) -> bool:
    """Whether a device is "cuda" without a number."""
    made = made_by(value, "torch.device")
    named = made.args[0] if made is not None and len(made.args) == 1 else value
    return named is not None and all(
        one.kind == "const" and one.const == "cuda" for one in choices(named)
    )
