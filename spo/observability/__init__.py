"""Structured logs, Prometheus metrics and OpenTelemetry traces."""
