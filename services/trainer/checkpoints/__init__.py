"""Training state between processes: what a rank's part holds, where it is kept, how it is saved and resumed from."""
