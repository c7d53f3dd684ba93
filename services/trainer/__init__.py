"""Leases a job, takes optimiser steps with DeepSpeed, publishes weights, writes checkpoints."""
