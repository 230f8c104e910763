"""Makes the files published beside the wheels (index, manifest, ...), and checks a release."""
