"""As in mamba_ssm."""
