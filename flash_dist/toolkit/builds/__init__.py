"""Describes our builds: manifests, contents of wheels and conda packages, files of releases."""
