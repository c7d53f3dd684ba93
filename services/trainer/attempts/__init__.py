"""What the trainer has in hand, written down before it begins, so that its successor knows what it died of."""
