"""What runs inside the jail: it has only the standard library, and nothing of the judge around it."""
