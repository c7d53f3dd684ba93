"""New jobs from the weights or the checkpoint of another one."""
