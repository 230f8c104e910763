"""What is published beside the wheels: index, manifest, statements; the gate of a release."""
