"""What the command line does besides training, one file for each command, and what they share."""
