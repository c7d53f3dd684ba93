"""The web pages, one module per subject, with their templates and static files."""
