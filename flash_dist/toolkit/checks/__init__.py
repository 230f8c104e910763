"""The checks of doctor: each a function from `Environment` to `CheckResult`."""
