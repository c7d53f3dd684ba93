"""`spo demo` and its sisters: whole jobs on a platform of their own, with a live view and a report."""
