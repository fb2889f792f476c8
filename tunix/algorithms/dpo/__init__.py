"""DPO as one family: how a completion is scored, how a pair's scores are compared, famous cases by name."""
