"""Audits a release: `audit` and `verify`."""
