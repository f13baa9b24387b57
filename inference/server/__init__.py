"""The HTTP server: the OpenAI API over a scheduler, and admin routes closed by default."""
