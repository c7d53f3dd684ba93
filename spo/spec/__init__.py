"""The JobSpec and what follows from it: checks with a pointer to each fault, the reward of a verdict, job states."""
