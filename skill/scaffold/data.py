"""What the templates see of the data: which parts a kind of data needs, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .literals import LINE

TITLES = {  # kind: (words, title)
    "text": ("text files", "Tokenized text"),
    "tokens": ("files of token ids", "Token files"),
    "jsonl": ("JSON lines", "Texts in JSON lines"),
    "datasets": ("a dataset on disk", "Texts of a dataset"),
    "images": ("folders of images", "Images by folder"),
    "import": ("data of its own", "Your own samples"),
    "synthetic": ("made-up sequences", "Made-up sequences"),
}
PARAMETERS = {"out": "out: Path", "sequence_length": "sequence_length: int", "vocabulary": "vocabulary: int"}
RAW = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
PACKAGES = {"tokenizer": "tokenizers", "datasets": "datasets", "images": "pillow"}


def data_files(data: Mapping[str, Any]) -> dict[str, bool]:
    """The modules of the data, and whether each is needed."""
    return {"data.py": True, "corpus.py": has_corpus(data), "images.py": data["kind"] == "images"}


def data_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the template context that follows from the section `data`."""
    data, length = values["data"], values["model"]["sequence_length"]
    kind, tokenizer = data["kind"], data.get("tokenizer") is not None
    packed = data.get("packing", True)
    vocabulary = tokenizer or kind in ("tokens", "images", "import", "synthetic")
    wanted = {
        "out": has_corpus(data) or kind == "images",
        "sequence_length": length is not None,
        "vocabulary": vocabulary,
    }
    byte_text = kind == "text" and not tokenizer
    words, title = ("byte-level text", "Byte-level text") if byte_text else TITLES[kind]
    arguments = ", ".join(_argument(name, values["model"]["kind"]) for name in wanted if wanted[name])
    return {
        "kind": kind,
        "tokenizer": tokenizer,
        "packed": packed,
        "byte_text": byte_text,
        "as_bytes": not tokenizer and kind in ("text", "jsonl", "datasets"),
        "corpus": has_corpus(data),
        "windows": packed and kind in ("text", "tokens", "jsonl", "datasets"),
        "documents": not packed,
        "stdlib": any(file.startswith("{stdlib}") for file in data.get("files", [])),
        "synthetic": kind == "synthetic",
        "images": kind == "images",
        "dry_sample": length is None and kind == "import",
        "vocabulary_checked": vocabulary,
        "load_parameters": [PARAMETERS[name] for name in wanted if wanted[name]],
        "corpus_parameters": ["out: Path"] + ["vocabulary: int"] * vocabulary,
        "corpus_type": "np.ndarray" if packed else "tuple[np.ndarray, np.ndarray]",
        "load_arguments": arguments,
        "load_fits": len(f"    train_data, held_out = rank_0_first(load_data, {arguments})") <= LINE,
        "token_type": _token_type(values["model"]["vocabulary"], tokenizer),
        "raw_dtype": RAW.get(data.get("dtype", "")),
        "cache_settings": _cache_settings(kind, tokenizer),
        "data_title": title,
        "data_words": words,
        "data_packages": [name for key, name in PACKAGES.items() if key == kind or (key == "tokenizer" and tokenizer)],
    }


def has_corpus(data: Mapping[str, Any]) -> bool:
    """Whether files become token ids in a module of their own."""
    return data["kind"] in ("tokens", "jsonl", "datasets") or data.get("tokenizer") is not None


def _argument(name: str, model: str) -> str:
    return "args.out" if name == "out" else f"config.{name}" if model == "decoder" else name.upper()


def _token_type(vocabulary: int, tokenizer: bool) -> str:
    """The smallest numpy type that holds every id."""
    return "uint8" if not tokenizer else "uint16" if vocabulary <= 1 << 16 else "uint32"


def _cache_settings(kind: str, tokenizer: bool) -> str:
    """The constants of data.py, beside the files, on which the tokens on the disk depend."""
    names = ["SPLIT"] * (kind == "datasets") + ["FIELD"] * (kind != "text") + ["SEPARATOR"]
    names += ["str(DTYPE)"] * tokenizer
    return ", ".join(names)
