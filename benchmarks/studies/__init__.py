"""Studies of learning on the toy contest in one process, with the library's losses: staleness, imitation beside SPO."""
