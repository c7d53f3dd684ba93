"""One folder per service, each started with `python -m services.<name>`; no service imports another."""
