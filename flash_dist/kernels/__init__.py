"""The two compiled libraries, called from Python, and their CPU implementation."""
