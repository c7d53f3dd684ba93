"""Responses that are answers: compared at once, or in a process that can be ended."""
