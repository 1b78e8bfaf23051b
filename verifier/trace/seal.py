"""Each line of a trace has a mark that only the probe of this run can make, so that nothing else passes for a record.

It guards against what a script writes by accident or by way of its files. A script that is out to deceive shares a process with the
probe, and no mark can help there (references/verify.md, limits).
"""


def mark(secret: str, number: int, text: str) -> str:
    """The mark of the `number`-th line of a trace."""
    import hashlib  # slow to import, and not needed to lint

    return hashlib.blake2b(f"{secret} {number} {text}".encode(), digest_size=8).hexdigest()
