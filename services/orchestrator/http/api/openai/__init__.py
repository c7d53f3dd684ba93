"""The paths that clients of OpenAI's API know: what is asked, what is answered, and what is captured of it."""
