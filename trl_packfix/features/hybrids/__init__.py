"""Recurrent and convolutional layers of hybrid models start anew in each document of a pack."""
