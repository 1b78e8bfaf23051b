"""`import verified_fsdp2.guard`: the laws in this run. Put it before the imports of torch's parts.

FSDP2_GUARD sets its options (`every=100 on-breach=warn out=run/guard.jsonl`), or is `off`.
"""

from .verifier.guard.begin import begin
from .verifier.guard.settings import Settings

begin(Settings())
