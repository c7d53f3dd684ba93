"""Doubles of services for tests and benchmarks: real gRPC servers with answers that a test can set."""
