"""Model folders that may be loaded, and the one forward pass shared by trainer and value-estimation."""
