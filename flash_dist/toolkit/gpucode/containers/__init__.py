"""Locates GPU code in a file: containers, their registrations, and bare cubins."""
