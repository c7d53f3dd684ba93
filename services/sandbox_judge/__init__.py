"""Runs programs in a sandbox and gives verdicts; `spo.spec.reward` says what a verdict is worth in a job."""
