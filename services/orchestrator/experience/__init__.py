"""The experience store across runs: queries, imports, exports, new verdicts, maintenance."""
