"""The docs of a rule as Markdown."""

from ..rules.base import Rule


def markdown(rule: Rule) -> str:
    """What the rule requires, what is seen, why, wrong and right code, the fix, source and torch
    versions.
    """
    page = rule.page()
    flat = {key: " ".join(text.split()) for key, text in page.items()}
    seen = [f"**Seen.** {flat['Seen']}"] if "Seen" in flat else []
    parts = [flat["Statement"], *seen, f"**Why.** {flat['Why'][0].upper()}{flat['Why'][1:]}"]
    for key in ("Wrong", "Right"):
        parts += [f"{key}:", f"```python\n{page[key]}\n```"]
    parts += [f"**Fix.** {flat['Fix']}", f"Source: {flat['Source']} torch: {flat['Torch']}"]
    return "\n\n".join(parts) + "\n"
