"""Calls that bend their scores or have sinks: what is asked for, and its gradients."""
