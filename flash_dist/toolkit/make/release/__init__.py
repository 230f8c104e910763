"""Makes the index, the manifest and other files of a release, and checks the release."""
