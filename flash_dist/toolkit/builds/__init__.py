"""Describes our builds: what they declare, hold and ship with."""
