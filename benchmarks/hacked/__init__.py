"""A hacked reward from planting to repair: what is stored (planted), and the jobs that learn from it (jobs)."""
