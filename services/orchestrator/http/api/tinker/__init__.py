"""The paths that clients of the Tinker API know, below /tinker: a thin layer over the service that trains for them."""
