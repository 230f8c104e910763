"""Which code runs where: rules on targets, GPUs and drivers that read nothing."""
