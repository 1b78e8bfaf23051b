"""What happens in a rank, one topic a file: each subscribes to functions of torch and to notices, and writes events."""
