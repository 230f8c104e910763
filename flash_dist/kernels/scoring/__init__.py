"""The operators of calls that bend their scores or have sinks."""
