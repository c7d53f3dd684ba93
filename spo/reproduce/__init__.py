"""`spo reproduce`: the paper's comparisons at small scale, from the plan of runs to the report."""
