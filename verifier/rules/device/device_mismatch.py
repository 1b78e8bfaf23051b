from ...trace.events import Memory
from ..base import Evidence, RaisedRule


class DeviceMismatch(RaisedRule):
    """Tensors that meet in an operation lie on one device.

    Why: FSDP2 moves the inputs of the root module to its device, and nothing else: targets, masks
    and positions that are made without `device=` stay on the CPU. On a GPU this raises; on the CPU
    nobody notices.
    Wrong:
        embedding = nn.Embedding(sequence_length, 64, device=device)
        positions = torch.arange(batch.shape[1])  # on the CPU
        x = embedding(positions)
    Right:
        embedding = nn.Embedding(sequence_length, 64, device=device)
        positions = torch.arange(batch.shape[1], device=batch.device)
        x = embedding(positions)
    Fix: Make the tensor with `device=x.device`, register it as a buffer, or move the batch and its
    targets to the device.
    Source: the message of torch 2.13.0; raised by the verifier where CUDA computes on the CPU.
    """

    pattern = r"Expected all tensors to be on the same device"
    named_by = ("cuda", "nccl", "accelerator")

    def applies(self, evidence: Evidence) -> str:
        run = evidence.train
        used = run is not None and any(m.cuda is not None for m in run.all(Memory))
        # Without CUDA, real or computed on the CPU, no two devices can meet
        # (zoo/written_for_gpus.py).
        if run is not None and run.completed and not (used or evidence.cuda_on_cpu):
            return "no rank used CUDA"
        return super().applies(evidence)
