"""Tests that only look at a platform: a package, since only then its fixtures end with its last test."""
