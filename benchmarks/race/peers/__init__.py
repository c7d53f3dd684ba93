"""TRL's trainers on the toy contest, each a process; they need requirements-trl.txt on the path."""
