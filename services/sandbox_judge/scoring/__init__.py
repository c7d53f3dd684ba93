"""What runs in the sandbox beside programs: tests of functions, mathematics, and functions that score responses."""
