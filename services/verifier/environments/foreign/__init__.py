"""Environments of other packages, in a process and virtual environment of their own behind our gRPC contract."""
