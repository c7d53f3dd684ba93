"""One module per claim about speed or cost, each measured against a named yardstick in the same run."""
