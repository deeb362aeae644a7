"""How the decoder's operations run on one kind of device: see `ops` for what they are."""
