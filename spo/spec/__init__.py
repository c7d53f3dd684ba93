"""The JobSpec: everything a person decides about a job, checked with a pointer to each wrong field."""
