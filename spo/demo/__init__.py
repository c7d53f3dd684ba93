"""`spo demo` and `spo demo-experience`: a whole job on the toy contest with a live view and a report."""
