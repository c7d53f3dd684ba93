"""The mathematics of the paper, without wire or plumbing: numbers and tensors in, numbers and tensors out."""
