"""Makes what is published with the wheels (index, manifest, ...), and checks a release."""
