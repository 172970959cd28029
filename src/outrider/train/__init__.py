"""Training of the demo pair that ships with the package: a small MoE target (and later its drafter)."""
