"""Uploaded task sets: stored in parts, checked in a confined process, loaded for jobs."""
