"""Policies that people use: names for what is served, completions of them, traffic that is captured as experience."""
