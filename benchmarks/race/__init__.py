"""CPU seconds until the toy contest is learnt: contestants by name, each run once and examined by the same process."""
