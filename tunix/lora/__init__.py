"""Low-rank adapters on a frozen base, through qwix; several of them in one batch."""
