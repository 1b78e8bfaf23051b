"""Buffers that ranks keep for themselves in training, and make equal before each use."""

from dataclasses import replace
from typing import Any

from test_laws import of, state, steps, tensor

from records import cases, judge
from verified_fsdp2.verifier.evidence import Sources

HEAD = """
class Head(nn.Module):
    def forward(self, x):
        logits = self.fc(x)
        if self.training:
            with torch.no_grad():
                self.prior.lerp_(logits.mean(0), 0.3)
            return logits {use}
        return logits - self.prior.log()
"""
SAVES = "def save(model):\n    torch.save(model.state_dict(), 'x')\n"


def read(size: float, saved: bool = False) -> dict[str, Any]:
    values = {"model.prior": tensor(size, "module")}
    return {"kind": "buffers_read", "step": 2, "values": values, "saved": saved}


def judged(text: str, *reads: list[dict[str, Any]]) -> str:
    """The status of a buffer that differs between two ranks in training, and is read so."""
    ranks = [
        [
            *steps(),
            state(1, model__prior=tensor(1.0, "module")),
            *own,
            state(3, model__prior=tensor(2.0 + number, "module")),
        ]
        for number, own in enumerate(reads)
    ]
    sources = Sources({"train.py": text}, ("train.py",))
    return judge("state-same-on-ranks", replace(of(*ranks), sources=sources)).status


@cases(
    "use, more, theirs, status",
    ("", "", [read(1.0)], "pass"),
    ("", "", [read(2.0)], "fail"),  # an evaluation reads what differs
    ("", "", [], "fail"),
    ("- self.prior", "", [read(1.0)], "fail"),  # training reads it
    ("", "def loss(m, x):\n    return x - m.prior\n", [read(1.0)], "fail"),
    ("", SAVES, [read(1.0)], "fail"),  # no save was seen
    ("", SAVES, [read(1.0), read(1.0, saved=True)], "pass"),
    ("", SAVES, [read(1.0), read(2.0, saved=True)], "fail"),
)
def test_a_buffer_that_is_equal_where_it_is_read(
    use: str, more: str, theirs: list[dict[str, Any]], status: str
) -> None:
    mine = [read(1.0, saved=one["saved"]) for one in theirs]
    assert judged(HEAD.replace("{use}", use) + more, mine, theirs) == status


def test_nothing_in_the_sources_names_the_buffer() -> None:
    assert judged("", [read(1.0)], [read(1.0)]) == "fail"
