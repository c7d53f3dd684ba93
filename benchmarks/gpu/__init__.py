"""`make gpu-check`: what the platform does on a machine with one GPU, in half an hour; also a rehearsal on CPU."""
