"""What is fetched before a router asks for it, and what came of it."""
