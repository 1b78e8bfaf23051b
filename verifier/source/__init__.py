"""What the sources alone show. Reads files, runs nothing."""
