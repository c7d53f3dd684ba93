"""When Redis came back empty or behind: how that is noticed, what is told of it, and jobs rebuilt from the disk."""
