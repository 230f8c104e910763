"""Whether a release is what it must be: `audit` and `verify`."""
