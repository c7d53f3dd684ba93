"""pass@k of a policy: scheduled while a job trains, or on demand."""
