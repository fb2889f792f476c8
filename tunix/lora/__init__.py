"""Low-rank adapters on a frozen base, through qwix; PEFT folders in and out."""
