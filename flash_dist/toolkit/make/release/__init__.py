"""Makes what is published beside the wheels (index, manifest, ...), and checks a release."""
