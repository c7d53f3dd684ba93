"""`benchmarks.api`'s platform, yardstick and load."""
