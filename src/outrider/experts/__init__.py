"""Expert memory: one byte layout, a store, slots per layer, a policy for victims, and the provider that moves bytes."""
