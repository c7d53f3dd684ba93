"""The command `spo`: one module per group of commands; `app` puts them together."""
