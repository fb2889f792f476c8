"""Several processes of one run: they find their places, meet, exchange small things and arrays, write folders together,
and watch each other until they end."""
