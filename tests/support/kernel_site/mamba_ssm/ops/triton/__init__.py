"""Stand for the package of this name in mamba_ssm."""
