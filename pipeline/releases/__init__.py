"""Versions of drafters: stored, loaded, decided on, exported."""
