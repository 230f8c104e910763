"""Compiles sources into libraries, and checks each kernel."""
