"""Runs programs in a sandbox and turns their outputs into verdicts and rewards."""
