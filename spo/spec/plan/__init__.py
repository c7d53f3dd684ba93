"""What a job needs before it runs: memory of each role, sizes on disk, and tokens per second by a stated model."""
