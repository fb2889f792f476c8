"""Workers that run the user's code, such as rewards and environments, within a deadline for each call."""
