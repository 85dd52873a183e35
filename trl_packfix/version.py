"""The version, for the package, its checkpoints and the wheel. Between two releases it is that of the next, `.dev0`."""

__version__ = "0.2.0.dev0"

# The libraries that decide how documents are packed and trained, in the versions of constraints.txt. A run on newer
# ones says so in its report: a release may change which models keep the documents of a pack apart.
TESTED_VERSIONS = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
}
