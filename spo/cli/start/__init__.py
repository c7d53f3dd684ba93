"""`spo init` and `spo convert`: a first job's file from a model and problems, or from another trainer's files."""
