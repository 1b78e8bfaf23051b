"""Marks each line of a trace, so that only lines of this run's probe are accepted as records.

The mark protects against accidental writes by the script. A script that forges records deliberately
shares a process with the probe, and no mark can prevent it (references/verify.md, limits).
"""


def mark(secret: str, number: int, text: str) -> str:
    """The mark of the `number`-th line of a trace."""
    import hashlib  # slow to import, and not needed to lint

    return hashlib.blake2b(f"{secret} {number} {text}".encode(), digest_size=8).hexdigest()
