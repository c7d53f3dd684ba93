"""What decides about a response and runs nothing: comparisons of answers, penalties, compositions of verifiers."""
