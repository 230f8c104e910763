"""Installs wheels as their users do and looks at what happens; measures sizes."""
