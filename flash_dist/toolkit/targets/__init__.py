"""Rules for targets, GPUs and drivers: which code runs where. They read no files."""
