"""Distillation: a student learns the distribution of a teacher."""
