"""Scores responses by what lies outside the platform, HTTP services and models as judges, and plays environments."""
