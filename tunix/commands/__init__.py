"""The commands besides `tunix run`, one file for each, and the modules that they share."""
