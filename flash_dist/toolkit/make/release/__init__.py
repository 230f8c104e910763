"""Publishes beside the wheels: index, manifest, statements; and checks a release."""
