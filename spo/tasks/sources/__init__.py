"""Task sets beside contests and own files: published sets, generators, data sets on disk; one module per kind."""
