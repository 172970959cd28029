"""The target's forward pass, on paged KV and with experts from an injected provider."""
