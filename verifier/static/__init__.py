"""The static tier: what the sources alone show. Reads files, runs nothing, imports neither torch nor the script."""

from .sources import find_local_norm, find_shard_use, project_files

__all__ = ["find_local_norm", "find_shard_use", "project_files"]
