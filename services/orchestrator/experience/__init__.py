"""The experience store as people use it: queries, imports, exports, new verdicts, maintenance."""
