"""Rules on devices and backends, which a run on the CPU cannot break."""

from __future__ import annotations

from .base import SourceRule


class CpuOffloadNcclOnly(SourceRule):
    """A process group that serves CPU-offloaded parameters has a backend for the CPU.

    Why: `CPUOffloadPolicy` keeps shards and gradients in the memory of the host. NCCL has no way to them, so the first
    collective on them (the norm for clipping, a checkpoint) stops with "No backend type associated with device type
    cpu", after the model was loaded and the first step was computed.
    Wrong:
        def build():
            dist.init_process_group("nccl")
            return fully_shard(Decoder(), offload_policy=CPUOffloadPolicy())
    Right:
        def build():
            dist.init_process_group("cpu:gloo,cuda:nccl")
            return fully_shard(Decoder(), offload_policy=CPUOffloadPolicy())
    Mend: Give the process group both backends: `init_process_group("cpu:gloo,cuda:nccl")`.
    Source: pytorch#148532, PR#136156; meta-pytorch/torchtune#1977; NVIDIA-NeMo/Automodel PR#3461.
    Torch: read from the sources alone; not run, it needs a GPU.
    """

    name = "cpu-offload-nccl-only"
    family = "device"


class SetDeviceMissing(SourceRule):
    """Every rank chooses its own GPU before anything is put on one.

    Why: `.cuda()` and `.to("cuda")` mean the current device, and that is GPU 0 in every process until somebody says
    otherwise. All ranks of a node then fill one GPU, or NCCL stops with "Duplicate GPU detected".
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
    Mend: Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, and give `init_process_group` the
    `device_id`.
    Source: awslabs/awsome-distributed-ai#1041; verl-project/verl#1752; pytorch#175531. `init_device_mesh("cuda", ...)`
    chooses a device itself, if nothing was put on a GPU before.
    Torch: read from the sources alone; not run, it needs two GPUs.
    """

    name = "set-device-missing"
    family = "device"


RULES = (CpuOffloadNcclOnly, SetDeviceMissing)
