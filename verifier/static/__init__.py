"""The static tier: what the sources alone show. Reads files, runs nothing, imports neither torch nor the script."""
