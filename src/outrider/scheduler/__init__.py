"""Who runs in the next step. Free of torch."""
