"""Starting, bounding and ending the processes of a run."""
