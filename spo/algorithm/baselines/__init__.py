"""Other people's objectives as terms of a job's loss: surrogates of policy gradients, preferences, distillation."""
