"""Block speculation: the DFlash drafter, lossless acceptance, and rounds of draft and verify."""
