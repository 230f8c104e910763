"""The checks of doctor: functions from an `Environment` to a `CheckResult` or None."""
