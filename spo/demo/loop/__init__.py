"""`spo demo-loop`: a served model, people who use it and say what they think, and rounds that learn from that."""
