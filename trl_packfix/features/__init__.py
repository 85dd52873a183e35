"""Features: each is a folder that the core never imports."""
