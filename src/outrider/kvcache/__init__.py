"""Keys and values of running sequences in fixed-size pages."""
