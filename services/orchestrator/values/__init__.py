"""Values of prompts under the reference: requests for them, progress, and a later reference."""
