"""`python -m trl_packfix`: the command line."""

from .cli import run_program

run_program()
