"""What is sharded, in which groups, and what is done to modules afterwards."""
